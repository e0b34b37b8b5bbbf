//! The table of `bench decode`: rows with their floors, and what they say about each other.

use std::fmt;

use serde::Serialize;

use super::machine::Machine;
use super::probe::Rates;
use super::row::{RowFigures, TokenFigures};
use super::spread::Spread;

/// A whole run.
#[derive(Serialize)]
pub(crate) struct DecodeBench {
    pub(crate) model: String,
    /// Whose geometry random weights have; `None` for a real model.
    pub(crate) synthetic: Option<String>,
    /// Where the figures of the replayed trace are from.
    pub(crate) activity: Option<&'static str>,
    pub(crate) memory: String,
    pub(crate) ctx: usize,
    pub(crate) machine: Machine,
    pub(crate) rates: Rates,
    pub(crate) rows: Vec<Row>,
}

/// Medians over the tokens of a row.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    dram_bytes: u64,
    budget_bytes: Option<u64>,
    peak_bytes: Option<u64>,
    /// Whether a memory cgroup held the process to the budget.
    in_cgroup: bool,
    io_mode: Option<&'static str>,
    engine: Option<String>,
    bytes_per_token: f64,
    selected: f64,
    missed: f64,
    /// Of the device while reads were in flight.
    read_bytes_per_s: f64,
    /// Beside the rate probed for this kind of reads.
    read_share: f64,
    io_ms: f64,
    memory_ms: f64,
    compute_ms: f64,
    /// Choosing neurons: part of compute.
    select_ms: f64,
    pub(crate) total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    tokens: usize,
    pub(crate) floor_ms: f64,
    /// Which of the two floors it is: `flash` or `DRAM`.
    floor_of: &'static str,
    total_over_floor: f64,
}

impl Row {
    pub(crate) fn new(
        name: &'static str,
        figures: &RowFigures,
        in_cgroup: bool,
        rates: &Rates,
    ) -> Self {
        let tokens = &figures.tokens;
        let median = |of: &dyn Fn(&TokenFigures) -> f64| Spread::of(tokens.iter().map(of)).median;
        let total = Spread::of(tokens.iter().map(|token| token.total_ms));
        let bytes = median(&|token| token.bytes_read);
        let records = median(&|token| token.record_bytes);
        let selects = median(&|token| token.selected) < 1.0;
        let (sequential, random) = (&rates.sequential, &rates.random);
        // A row that needs everything reads records in order, and so do streamed matrices.
        let (at_random, in_order) = match selects {
            true => (records, (bytes - records).max(0.0)),
            false => (0.0, bytes),
        };
        let flash_ms = 1000.0
            * (at_random / random.bytes_per_s.median + in_order / sequential.bytes_per_s.median);
        let memory = &rates.memory.bytes_per_s;
        let dram_ms = 1000.0 * median(&|token| token.touched_bytes) / memory.median;
        let floor_ms = flash_ms.max(dram_ms);
        let in_flight_ms = median(&|token| token.in_flight_ms);
        let per_s = |ms: f64| if ms > 0.0 { bytes / ms * 1000.0 } else { 0.0 };
        Self {
            name,
            dram_bytes: figures.dram_bytes,
            budget_bytes: Some(figures.budget_bytes),
            peak_bytes: figures.peak_bytes,
            in_cgroup,
            io_mode: Some(if figures.direct { "direct" } else { "buffered" }),
            engine: Some(figures.engine.clone()),
            bytes_per_token: bytes,
            selected: median(&|token| token.selected),
            missed: median(&|token| token.missed),
            read_bytes_per_s: per_s(in_flight_ms),
            read_share: if in_flight_ms > 0.0 {
                flash_ms / in_flight_ms
            } else {
                0.0
            },
            io_ms: median(&|token| token.io_ms),
            memory_ms: median(&|token| token.memory_ms),
            compute_ms: median(&TokenFigures::compute_ms),
            select_ms: median(&|token| token.select_ms),
            total_ms: total.median,
            total_ms_min: total.min,
            total_ms_max: total.max,
            tokens: tokens.len(),
            floor_ms,
            floor_of: if flash_ms > dram_ms { "flash" } else { "DRAM" },
            total_over_floor: total.median / floor_ms,
        }
    }

    /// Weights in DRAM, computed by somebody else.
    pub(crate) fn dense(name: &'static str, bytes: u64, times_ms: &[f64], rates: &Rates) -> Self {
        let tokens = times_ms.iter().map(|total_ms| TokenFigures {
            total_ms: *total_ms,
            touched_bytes: bytes as f64,
            selected: 1.0,
            ..TokenFigures::default()
        });
        let figures = RowFigures {
            dram_bytes: bytes,
            budget_bytes: 0,
            peak_bytes: None,
            direct: false,
            engine: String::new(),
            tokens: tokens.collect(),
        };
        Self {
            budget_bytes: None,
            io_mode: None,
            engine: None,
            ..Self::new(name, &figures, false, rates)
        }
    }

    fn share(&self, part_ms: f64) -> f64 {
        100.0 * part_ms / self.total_ms
    }
}

impl DecodeBench {
    /// Everything above the rows.
    pub(crate) fn head(&self) -> String {
        let gb = |rate: &Spread| format!("{:.2} GB/s", rate.median / 1e9);
        let kind = match (&self.synthetic, self.activity) {
            (Some(name), Some(source)) => {
                format!("synthetic weights ({name}), replayed trace with the figures of {source}")
            }
            _ => "real weights".to_owned(),
        };
        let (sequential, random) = (&self.rates.sequential, &self.rates.random);
        let memory = &self.rates.memory;
        format!(
            "{}: {kind}\n{}\nbudget {}, context {}\n\
             probed: in order {} ({}, {} KiB x {}), single records {} ({}, {} KiB x {}), DRAM {} ({} threads, {} streams)\n\n\
             | row | DRAM GB | GB/token | GB/s | of probed | I/O ms | memory ms | compute ms | (selecting) | total ms (min..max) | \
             floor ms | total/floor |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
            self.model,
            self.machine,
            self.memory,
            self.ctx,
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

    /// What the rows say about each other.
    pub(crate) fn foot(&self) -> String {
        let row = |name: &str| self.rows.iter().find(|row| row.name == name);
        let Some(all) = row("all") else {
            return String::new();
        };
        let mut lines = vec![String::new()];
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
                lines.push(format!("all against {}: {times:.2}x faster", other.name));
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
        for row in &self.rows {
            if let (Some(peak), Some(budget)) = (row.peak_bytes, row.budget_bytes) {
                let judge = if row.in_cgroup {
                    "in a cgroup of that"
                } else {
                    "no cgroup"
                };
                lines.push(format!(
                    "{}: peak {peak} bytes of {budget} ({judge}), {}, {}, {} tokens",
                    row.name,
                    row.io_mode.unwrap_or("no reads"),
                    row.engine.as_deref().unwrap_or("no engine"),
                    row.tokens
                ));
            }
        }
        lines.join("\n") + "\n"
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
