//! `wick bench decode`: what a token takes at one budget, from reading everything to all that this program does.
//!
//! Each row is a process of its own ([`row`](super::row)), inside a memory cgroup of exactly the budget where one can
//! be made. The rates that a token cannot beat are probed in the same run, repeatedly, and kept at their best. Rows:
//!
//! | row | what it does |
//! |---|---|
//! | naive | reads every weight for each token |
//! | hybrid | half resident, half streamed, as the budget allows; all neurons |
//! | +selector | reads the selected neurons, rows and columns apart, and forgets them |
//! | +window | keeps what the last tokens used |
//! | +bundling | reads a neuron as one record |
//! | all | computes while reads are in flight |
//! | +lookahead | and reads what the next layer will probably want |
//! | dense in DRAM | every weight in memory, candle's own matmul, products only |
//!
//! With `--selector dip` or `dip-ca` the rows of a selector go by columns: `+selector` keeps none, `+window` keeps columns in
//! two caches a layer, and `all` computes while reads are in flight. Bundling and reading ahead mean nothing there.
//!
//! The baselines `naive` and `hybrid` compute while they read, too, with the kernels of the others. Parts that are read
//! apart are not checked, which takes a little off `+selector` and `+window`.
//!
//! A floor is the longer of two times: what this row reads (missing records at the rate of single ones, the rest, and
//! everything in rows without a selector, at the rate in order), and the bytes that products go through at the rate of
//! memory.
//!
//! Models with random weights replay a made-up trace, see [`synthetic`](crate::synthetic); the output says so.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Result};
use candle_wick::{available_memory_bytes, HumanBytes, Memory, SelectorKind};
use candle_wick_models::LoadOptions;
use clap::Args;

use super::cgroup::MemoryCgroup;
use super::dense::{dense_bytes, DenseModel};
use super::row::{RowFigures, RowSpec};
use super::subject::{Subject, SubjectArgs};
use super::table::{DecodeBench, Measured, Row};
use crate::args::{positive, share};
use crate::dip::DipArgs;
use crate::machine::Machine;
use crate::output;
use crate::probe::Rates;

/// Neurons that stream through each layer of the naive row: two passes' worth.
const NAIVE_SLOTS: usize = 512;
/// The paper's protocol: a prompt of 128 tokens and 256 more.
pub(super) const CTX_DEFAULT: usize = 384;
/// By how much the floor of one process may differ from that of another.
pub(super) const PROCESS_SLACK_BYTES: u64 = 4 << 20;
/// Rates are probed again after a row when this has passed.
const PROBE_EVERY: Duration = Duration::from_secs(15);
/// Rows that go through most of the model get this many tokens at most.
const SLOW_TOKENS: usize = 5;
/// What direct reads are a multiple of on most devices.
const BLOCK_BYTES: usize = 512;

#[derive(Args, Debug)]
pub(crate) struct DecodeArgs {
    #[command(flatten)]
    subject: SubjectArgs,

    /// Budget of all rows but `naive` and `dense in DRAM`
    #[arg(long, value_name = "SIZE", default_value = "50%")]
    memory: Memory,

    /// Who chooses in the rows with a selector, if not the folder's predictors: dip or dip-ca
    #[arg(long, value_name = "NAME")]
    selector: Option<SelectorKind>,

    #[command(flatten)]
    dip: DipArgs,

    /// Positions of the KV cache that the budget is planned for [default: 384, or the model's longest]
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<usize>,

    /// Tokens measured in each row, after half as many to warm up; in naive and hybrid at most 5, after one
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = positive)]
    tokens: usize,

    /// For random weights: share of a token's neurons that a guess ahead names, with a wrong one for each it misses
    #[arg(long, value_name = "SHARE", default_value = "80%", value_parser = share)]
    guessed: f64,

    /// Rows to measure, of naive, hybrid, +selector, +window, +bundling, all (every part on), +lookahead and "dense in
    /// DRAM" (candle's own matmul) [default: all that the model has]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    rows: Vec<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What all rows share.
struct Bench<'a> {
    args: &'a DecodeArgs,
    subject: Subject,
    ctx: usize,
}

pub(crate) fn run(args: &DecodeArgs) -> Result<ExitCode> {
    let subject = Subject::open(&args.subject)?;
    let bench = Bench {
        args,
        ctx: match args.ctx {
            Some(ctx) => ctx,
            None => subject.ctx_up_to(CTX_DEFAULT)?,
        },
        subject,
    };
    let names = bench.names()?;
    let decoded = args.tokens + args.tokens.div_ceil(2);
    ensure!(
        decoded <= bench.ctx,
        "{} tokens and half as many to warm up exceed the context of {}",
        args.tokens,
        bench.ctx
    );
    let (rates, measured, status) = bench.measure(&names)?;
    let rows = measured.iter().map(|row| Row::new(row, &rates)).collect();
    let table = DecodeBench {
        model: bench.subject.folder.path().display().to_string(),
        activity: bench.subject.activity.map(|activity| activity.source),
        synthetic: bench.subject.synthetic,
        guessed: args.guessed,
        memory: describe(args.memory),
        cache_policy: args.subject.cache_policy.name(),
        ctx: bench.ctx,
        machine: Machine::this(),
        rates,
        rows,
    };
    match args.json {
        true => output::print_json(&table)?,
        false => output::print(&table.to_string())?,
    }
    Ok(status)
}

pub(super) fn describe(memory: Memory) -> String {
    match memory {
        Memory::Bytes(bytes) => HumanBytes(bytes).to_string(),
        Memory::Percent(percent) => format!("{percent}% of the weights"),
    }
}

const DENSE_ROW: &str = "dense in DRAM";
const ROWS: [&str; 8] = [
    "naive",
    "hybrid",
    "+selector",
    "+window",
    "+bundling",
    "all",
    "+lookahead",
    DENSE_ROW,
];

impl Bench<'_> {
    /// The rows to measure; without predictors those of a selector make no sense.
    fn names(&self) -> Result<Vec<&'static str>> {
        let is_dip = self.args.selector.is_some();
        let has_predictors = self.subject.folder.predictors()?.is_some();
        let has_selector = is_dip || has_predictors;
        if let Some(other) = self.args.selector.filter(|kind| !kind.is_dip()) {
            bail!("--selector takes dip or dip-ca here, not {other}: predictors are used where there are some");
        }
        self.args.dip.check(self.args.selector)?;
        ensure!(
            !self.args.dip.options().dense_prompt,
            "--dense-prompt has no meaning here: rows decode, and have no prompt"
        );
        for asked in &self.args.rows {
            ensure!(
                ROWS.contains(&asked.as_str()),
                "no row is called \"{asked}\"; there are {}",
                ROWS.join(", ")
            );
        }
        let is_wanted = |name: &&str| {
            let asked = &self.args.rows;
            let needs_selector = !["naive", "hybrid", DENSE_ROW].contains(name);
            (asked.is_empty() || asked.iter().any(|asked| asked == name))
                && (has_selector || !needs_selector)
                && !(is_dip && ["+bundling", "+lookahead"].contains(name))
        };
        let names: Vec<_> = ROWS.into_iter().filter(is_wanted).collect();
        if !is_dip && !self.can_read_apart() {
            output::note(
                "gated or unaligned neurons: +selector and +window read rows and column together",
            );
        }
        if !has_selector {
            output::note("no predictors in this folder: only rows without a selector");
        }
        ensure!(!names.is_empty(), "no row is left to measure");
        Ok(names)
    }

    /// All rows, and the best rates that the machine showed before, between and after them: a rate that a moment's
    /// disturbance lowered would raise the floors, and flatter the rows.
    fn measure(&self, names: &[&'static str]) -> Result<(Rates, Vec<Measured>, ExitCode)> {
        let mut rates = self.subject.rates()?;
        let mut probed = Instant::now();
        let mut rows = Vec::new();
        let mut status = ExitCode::SUCCESS;
        for name in names {
            match self.row(name) {
                Ok(Some(row)) => {
                    output::note(&format!("{name}: {:.1} ms a token", row.median_ms()));
                    rows.push(row);
                }
                Ok(None) => {}
                // The others are worth having.
                Err(error) => {
                    output::complain(&format!("{name}: {}", output::one_line(&error)));
                    status = ExitCode::FAILURE;
                }
            }
            if probed.elapsed() > PROBE_EVERY {
                rates.keep_best(self.subject.rates()?);
                probed = Instant::now();
            }
        }
        ensure!(!rows.is_empty(), "no row could be measured");
        Ok((rates, rows, status))
    }

    /// `None` where it cannot be measured here.
    fn row(&self, name: &'static str) -> Result<Option<Measured>> {
        if name == DENSE_ROW {
            return self.dense_row();
        }
        let spec = self.spec(name)?;
        let cgroup = MemoryCgroup::new(spec.limit_bytes);
        let figures = spec.in_own_process(cgroup.as_ref())?;
        Ok(Some(Measured {
            name: name.to_owned(),
            figures,
            in_cgroup: cgroup.is_some(),
        }))
    }

    /// Whether rows and columns of a neuron can be read apart without copies and without more memory than together.
    fn can_read_apart(&self) -> bool {
        let mut layers = self.subject.folder.manifest().layers.iter();
        layers.all(|layer| {
            let row_bytes = layer.record_layout().row_bytes();
            layer.gate.is_none() && row_bytes.is_multiple_of(BLOCK_BYTES)
        })
    }

    /// How the row of this name loads the model.
    fn spec(&self, name: &str) -> Result<RowSpec> {
        let has_selector = name != "naive" && name != "hybrid";
        // The row is there only where predictors are.
        let predictors = self.subject.folder.predictors()?.filter(|_| has_selector);
        let selector = match (self.args.selector, predictors) {
            (Some(dip), _) if has_selector => dip,
            (_, Some(found)) => SelectorKind::of(found.form),
            _ => SelectorKind::Dense,
        };
        let mut options = LoadOptions {
            selector: Some(selector),
            dip: self.args.dip.options(),
            ..self.subject.options(self.args.memory, self.ctx)
        };
        let is_naive = name == "naive";
        if is_naive {
            // At the floor every matrix is streamed.
            let plan = candle_wick_models::plan(&self.subject.folder, &options)?;
            options.memory = Some(Memory::Bytes(plan.floor_bytes + PROCESS_SLACK_BYTES));
            options.slots_per_layer = Some(NAIVE_SLOTS);
        }
        let keeps_nothing = is_naive || name == "+selector";
        let tokens = match has_selector {
            true => self.args.tokens,
            false => self.args.tokens.min(SLOW_TOKENS),
        };
        Ok(RowSpec {
            window_tokens: keeps_nothing.then_some(0),
            overlap: !has_selector || ["all", "+lookahead"].contains(&name),
            bundling: !["+selector", "+window"].contains(&name)
                || selector.is_dip()
                || !self.can_read_apart(),
            lookahead: name == "+lookahead",
            guessed: self.args.guessed,
            warmup_tokens: if has_selector { tokens.div_ceil(2) } else { 1 },
            tokens,
            ..self.subject.spec(&options)?
        })
    }

    /// `None` where the weights do not fit into memory.
    fn dense_row(&self) -> Result<Option<Measured>> {
        let needed = dense_bytes(&self.subject.folder);
        if available_memory_bytes().is_some_and(|free| free < needed + needed / 20) {
            output::note(&format!(
                "{DENSE_ROW}: left out, {} of weights do not fit into free memory",
                HumanBytes(needed)
            ));
            return Ok(None);
        }
        let model = DenseModel::new(&self.subject.folder)?;
        model.token_ms()?;
        let times: Result<Vec<f64>> = (0..SLOW_TOKENS).map(|_| model.token_ms()).collect();
        Ok(Some(Measured {
            name: DENSE_ROW.to_owned(),
            figures: RowFigures::in_dram(model.bytes, &times?),
            in_cgroup: false,
        }))
    }
}
