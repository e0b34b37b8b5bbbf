//! The table of `bench decode`: rows with their floors, and what they say about each other.

use std::fmt;

use serde::Serialize;

use super::row::{RowFigures, TokenFigures};
use crate::machine::Machine;
use crate::probe::Rates;
use crate::spread::Spread;

/// A whole run.
#[derive(Serialize)]
pub(crate) struct DecodeBench {
    pub(crate) model: String,
    /// Whose geometry random weights have; `None` for a real model.
    pub(crate) synthetic: Option<String>,
    /// Where the figures of the replayed trace are from.
    pub(crate) activity: Option<&'static str>,
    /// Share of a token's neurons that guesses name in the replayed trace.
    pub(crate) guessed: f64,
    pub(crate) memory: String,
    /// Who left the neuron cache; rows that forget at once have no use for it.
    pub(crate) cache_policy: &'static str,
    pub(crate) ctx: usize,
    pub(crate) machine: Machine,
    pub(crate) rates: Rates,
    pub(crate) rows: Vec<Row>,
}

/// What one row's process found.
pub(crate) struct Measured {
    pub(crate) name: String,
    pub(crate) figures: RowFigures,
    /// Whether a memory cgroup held the process to its budget.
    pub(crate) in_cgroup: bool,
}

/// Medians over the tokens of a row.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) dram_bytes: u64,
    pub(crate) budget_bytes: Option<u64>,
    pub(crate) peak_bytes: Option<u64>,
    pub(crate) in_cgroup: bool,
    pub(crate) reads: Option<String>,
    pub(crate) bytes_per_token: f64,
    /// Shares of the FFN's neurons.
    pub(crate) selected: f64,
    pub(crate) missed: f64,
    /// Of the device while reads were in flight.
    read_bytes_per_s: f64,
    /// Beside the rate probed for this kind of reads.
    read_share: f64,
    pub(crate) io_ms: f64,
    memory_ms: f64,
    compute_ms: f64,
    /// Choosing neurons: part of compute.
    select_ms: f64,
    /// Products of the FFNs: part of compute.
    ffn_ms: f64,
    /// Neurons read ahead, and those of them that were then selected.
    ahead_read: f64,
    ahead_used: f64,
    pub(crate) total_ms: f64,
    pub(crate) total_ms_min: f64,
    pub(crate) total_ms_max: f64,
    tokens: usize,
    pub(crate) floor_ms: f64,
    /// Which of the two floors it is: `flash` or `DRAM`.
    floor_of: &'static str,
    total_over_floor: f64,
}

impl Measured {
    fn median(&self, of: impl Fn(&TokenFigures) -> f64) -> f64 {
        Spread::of(self.figures.tokens.iter().map(of)).median
    }

    pub(crate) fn median_ms(&self) -> f64 {
        self.median(|token| token.total_ms)
    }

    /// Milliseconds that a token's reads and its bytes in DRAM take at the least.
    fn floors_ms(&self, rates: &Rates) -> (f64, f64) {
        let streamed = self.median(|token| token.streamed_bytes);
        let records = self.median(|token| token.record_bytes);
        // A row that needs everything reads records in order, as streamed matrices are read.
        let (at_random, in_order) = match self.median(|token| token.selected) < 1.0 {
            true => (records, streamed),
            false => (0.0, records + streamed),
        };
        let (sequential, random) = (&rates.sequential.bytes_per_s, &rates.random.bytes_per_s);
        let flash_s = at_random / random.median + in_order / sequential.median;
        let dram_s = self.median(|token| token.touched_bytes) / rates.memory.bytes_per_s.median;
        (1000.0 * flash_s, 1000.0 * dram_s)
    }
}

impl Row {
    pub(crate) fn new(measured: &Measured, rates: &Rates) -> Self {
        let figures = &measured.figures;
        let median = |of: fn(&TokenFigures) -> f64| measured.median(of);
        let total = Spread::of(figures.tokens.iter().map(|token| token.total_ms));
        let (flash_ms, dram_ms) = measured.floors_ms(rates);
        let floor_ms = flash_ms.max(dram_ms);
        let (bytes, in_flight_ms) = (
            median(|token| token.bytes_read),
            median(|token| token.in_flight_ms),
        );
        let while_reading = |amount: f64| match in_flight_ms > 0.0 {
            true => amount / in_flight_ms,
            false => 0.0,
        };
        Self {
            name: measured.name.clone(),
            dram_bytes: figures.dram_bytes,
            budget_bytes: figures.budget_bytes,
            peak_bytes: figures.peak_bytes,
            in_cgroup: measured.in_cgroup,
            reads: figures.reads.clone(),
            bytes_per_token: bytes,
            selected: median(|token| token.selected),
            missed: median(|token| token.missed),
            read_bytes_per_s: 1000.0 * while_reading(bytes),
            read_share: while_reading(flash_ms),
            io_ms: median(|token| token.io_ms),
            memory_ms: median(|token| token.memory_ms),
            compute_ms: median(TokenFigures::compute_ms),
            select_ms: median(|token| token.select_ms),
            ffn_ms: median(|token| token.ffn_ms),
            ahead_read: median(|token| token.ahead_read),
            ahead_used: median(|token| token.ahead_used),
            total_ms: total.median,
            total_ms_min: total.min,
            total_ms_max: total.max,
            tokens: figures.tokens.len(),
            floor_ms,
            floor_of: if flash_ms > dram_ms { "flash" } else { "DRAM" },
            total_over_floor: total.median / floor_ms,
        }
    }

    fn share(&self, part_ms: f64) -> f64 {
        100.0 * part_ms / self.total_ms
    }
}

/// The peak of a process beside its budget, and who held it to that.
pub(super) fn peak_of_budget(
    peak_bytes: Option<u64>,
    budget_bytes: Option<u64>,
    in_cgroup: bool,
) -> Option<String> {
    let (peak, budget) = (peak_bytes?, budget_bytes?);
    let judge = if in_cgroup {
        "in a cgroup of that"
    } else {
        "no cgroup"
    };
    Some(format!("peak {peak} bytes of {budget} ({judge})"))
}

impl DecodeBench {
    /// Everything above the rows.
    fn head(&self) -> String {
        let gb = |rate: &Spread| format!("{:.2} GB/s", rate.median / 1e9);
        let kind = match (&self.synthetic, self.activity) {
            (Some(name), Some(source)) => {
                format!(
                    "synthetic weights ({name}), replayed trace with the figures of {source}; guesses ahead name {:.0} % of \
                     a token's neurons (assumed)",
                    100.0 * self.guessed
                )
            }
            _ => "real weights".to_owned(),
        };
        let (sequential, random) = (&self.rates.sequential, &self.rates.random);
        let memory = &self.rates.memory;
        format!(
            "{}: {kind}\n{}\nbudget {}, context {}, cache {}\n\
             probed: in order {} ({}, {} KiB x {}), single records {} ({}, {} KiB x {}), DRAM {} ({} threads, {} streams)\n\n\
             | row | DRAM GB | GB/token | GB/s | of probed | I/O ms | memory ms | compute ms | (selecting) | total ms (min..max) | \
             floor ms | total/floor |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
            self.model,
            self.machine,
            self.memory,
            self.ctx,
            self.cache_policy,
            gb(&sequential.bytes_per_s),
            sequential.setting.engine,
            sequential.setting.read_bytes >> 10,
            sequential.setting.in_flight,
            gb(&random.bytes_per_s),
            random.setting.engine,
            random.setting.read_bytes >> 10,
            random.setting.in_flight,
            gb(&memory.bytes_per_s),
            memory.setting.threads,
            memory.setting.streams,
        )
    }

    /// The row `all` beside the others.
    fn comparisons(&self, all: &Row) -> Vec<String> {
        let row = |name: &str| self.rows.iter().find(|row| row.name == name);
        let mut lines = Vec::new();
        for other in [
            "naive",
            "hybrid",
            "+selector",
            "+window",
            "+bundling",
            "dense in DRAM",
        ] {
            if let Some(other) = row(other) {
                let times = other.total_ms / all.total_ms;
                lines.push(format!("all is {times:.2} times as fast as {}", other.name));
            }
        }
        lines.push(format!(
            "all: {:.1} tokens/s; selecting {:.1} % and memory management {:.1} % of the time; {:.1} % of the FFN selected, {:.1} % read",
            1000.0 / all.total_ms,
            all.share(all.select_ms),
            all.share(all.memory_ms),
            100.0 * all.selected,
            100.0 * all.missed,
        ));
        if let Some(ahead) = row("+lookahead").filter(|row| row.ahead_read > 0.0) {
            lines.push(format!(
                "+lookahead is {:.2} times as fast as all; {:.0} neurons read ahead a token, {:.1} % of them used",
                all.total_ms / ahead.total_ms,
                ahead.ahead_read,
                100.0 * ahead.ahead_used / ahead.ahead_read,
            ));
        }
        lines
    }

    /// What the rows say about each other.
    fn foot(&self) -> String {
        let mut lines = vec![String::new()];
        if let Some(all) = self.rows.iter().find(|row| row.name == "all") {
            lines.extend(self.comparisons(all));
        }
        for row in &self.rows {
            if let Some(peak) = peak_of_budget(row.peak_bytes, row.budget_bytes, row.in_cgroup) {
                lines.push(format!(
                    "{}: {peak}, {}, {} tokens",
                    row.name,
                    row.reads.as_deref().unwrap_or("no reads"),
                    row.tokens
                ));
            }
        }
        lines.join("\n") + "\n"
    }
}

impl fmt::Display for DecodeBench {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.head())?;
        for row in &self.rows {
            writeln!(f, "{row}")?;
        }
        f.write_str(&self.foot())
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: f64| bytes / 1e9;
        write!(
            f,
            "| {} | {:.2} | {:.3} | {:.2} | {:.2} | {:.1} | {:.2} | {:.1} | {:.1} | {:.1} ({:.1}..{:.1}) | {:.1} ({}) | {:.2} |",
            self.name,
            gb(self.dram_bytes as f64),
            gb(self.bytes_per_token),
            gb(self.read_bytes_per_s),
            self.read_share,
            self.io_ms,
            self.memory_ms,
            self.compute_ms,
            self.select_ms,
            self.total_ms,
            self.total_ms_min,
            self.total_ms_max,
            self.floor_ms,
            self.floor_of,
            self.total_over_floor,
        )
    }
}
