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
//! The baselines `naive` and `hybrid` compute while they read, too, with the kernels of the others. Parts that are read
//! apart are not checked, which takes a little off `+selector` and `+window`.
//!
//! A floor is the longer of two times: what this row reads (missing records at the rate of single ones, the rest, and
//! everything in rows without a selector, at the rate in order), and the bytes that products go through at the rate of
//! memory.
//!
//! Models with random weights replay a made-up trace, see [`figures`](super::figures); the output says so.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use candle_wick::{available_memory_bytes, FlashFolder, HumanBytes, Memory, SelectorKind};
use candle_wick_models::LoadOptions;
use clap::Args;

use super::cgroup::MemoryCgroup;
use super::dense::{dense_bytes, DenseModel};
use super::figures::{activity, Activity};
use super::machine::Machine;
use super::probe::{Rates, Records};
use super::row::{RowFigures, RowSpec};
use super::table::{DecodeBench, Measured, Row};
use crate::args::{positive, share, FolderArgs};
use crate::output;

/// Neurons that stream through each layer of the naive row: two passes' worth.
const NAIVE_SLOTS: usize = 512;
/// The paper's protocol: a prompt of 128 tokens and 256 more.
const CTX_DEFAULT: usize = 384;
/// By how much the floor of one process may differ from that of another.
const PROCESS_SLACK_BYTES: u64 = 4 << 20;
/// Rates are probed again after a row when this has passed.
const PROBE_EVERY: Duration = Duration::from_secs(15);
/// Rows that go through most of the model get this many tokens at most.
const SLOW_TOKENS: usize = 5;
/// What direct reads are a multiple of on most devices.
const BLOCK_BYTES: usize = 512;

#[derive(Args, Debug)]
pub(crate) struct DecodeArgs {
    #[command(flatten)]
    folder: FolderArgs,

    /// Budget of all rows but `naive` and `dense in DRAM`
    #[arg(long, value_name = "SIZE", default_value = "50%")]
    memory: Memory,

    /// Positions of the KV cache that the budget is planned for [default: 384, or the model's longest]
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<usize>,

    /// Tokens measured in each row, after half as many to warm up; in naive and hybrid at most 5, after one
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = positive)]
    tokens: usize,

    /// For random weights: share of a token's neurons that a guess ahead names, with a wrong one for each it misses
    #[arg(long, value_name = "SHARE", default_value_t = 0.8, value_parser = share)]
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
    folder: FlashFolder,
    ctx: usize,
    activity: Option<&'static Activity>,
}

pub(crate) fn run(args: &DecodeArgs) -> Result<ExitCode> {
    let folder = args.folder.open()?;
    let synthetic = synthetic_name(&folder)?;
    let model_type = folder.manifest().model_type.clone();
    let bench = Bench {
        args,
        activity: synthetic.as_ref().map(|_| activity(&model_type)),
        ctx: match args.ctx {
            Some(ctx) => ctx,
            None => longest_ctx(&folder)?.min(CTX_DEFAULT),
        },
        folder,
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
        model: bench.folder.path().display().to_string(),
        synthetic,
        activity: bench.activity.map(|activity| activity.source),
        guessed: args.guessed,
        memory: describe(args.memory),
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

/// The model's longest context, as far as it matters here.
fn longest_ctx(folder: &FlashFolder) -> Result<usize> {
    Ok(candle_wick_models::plan(folder, &LoadOptions::default())?.ctx)
}

/// Whose geometry the random weights of the folder have.
pub(crate) fn synthetic_name(folder: &FlashFolder) -> Result<Option<String>> {
    let config: serde_json::Value = serde_json::from_str(&folder.config_json()?)
        .context("config.json of a converted folder")?;
    let name = config.get(candle_wick_convert::synthetic::SYNTHETIC_KEY);
    Ok(name.and_then(|name| name.as_str()).map(str::to_owned))
}

fn describe(memory: Memory) -> String {
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
        let has_predictors = self.folder.predictors()?.is_some();
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
                && (has_predictors || !needs_selector)
        };
        let names: Vec<_> = ROWS.into_iter().filter(is_wanted).collect();
        if !self.can_read_apart() {
            output::note(
                "gated or unaligned neurons: +selector and +window read rows and column together",
            );
        }
        if !has_predictors {
            output::note("no predictors in this folder: only rows without a selector");
        }
        ensure!(!names.is_empty(), "no row is left to measure");
        Ok(names)
    }

    fn rates(&self) -> Result<Rates> {
        let (file, extent) = self
            .folder
            .record_extent(0)
            .context("a model without layers")?;
        let layer = &self.folder.manifest().layers[0];
        let records = Records {
            offset_bytes: extent.offset_bytes,
            stride_bytes: layer.stride_bytes,
            count: layer.intermediate_size as u64,
        };
        Rates::measure(file, &records)
    }

    /// All rows, and the best rates that the machine showed before, between and after them: a rate that a moment's
    /// disturbance lowered would raise the floors, and flatter the rows.
    fn measure(&self, names: &[&'static str]) -> Result<(Rates, Vec<Measured>, ExitCode)> {
        let mut rates = self.rates()?;
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
                rates.keep_best(self.rates()?);
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
        let figures = measure(&spec, cgroup.as_ref())?;
        Ok(Some(Measured {
            name,
            figures,
            in_cgroup: cgroup.is_some(),
        }))
    }

    /// Whether rows and columns of a neuron can be read apart without copies and without more memory than together.
    fn can_read_apart(&self) -> bool {
        let mut layers = self.folder.manifest().layers.iter();
        layers.all(|layer| {
            let row_bytes = layer.record_layout().row_bytes();
            layer.gate.is_none() && row_bytes.is_multiple_of(BLOCK_BYTES)
        })
    }

    /// How the row of this name loads the model.
    fn spec(&self, name: &str) -> Result<RowSpec> {
        let has_selector = name != "naive" && name != "hybrid";
        let selector = if has_selector {
            SelectorKind::LowRank
        } else {
            SelectorKind::Dense
        };
        let mut options = LoadOptions {
            memory: Some(self.args.memory),
            ctx: Some(self.ctx),
            selector: Some(selector),
            ..LoadOptions::default()
        };
        let mut memory = self.args.memory;
        let plan = candle_wick_models::plan(&self.folder, &options)?;
        let is_naive = name == "naive";
        let mut limit_bytes = plan.total_bytes;
        if is_naive {
            // At the floor every matrix is streamed.
            limit_bytes = plan.floor_bytes + PROCESS_SLACK_BYTES;
            memory = Memory::Bytes(limit_bytes);
            options.memory = Some(memory);
            options.slots_per_layer = Some(NAIVE_SLOTS);
            limit_bytes = candle_wick_models::plan(&self.folder, &options)?
                .total_bytes
                .max(limit_bytes);
        }
        let keeps_nothing = is_naive || name == "+selector";
        let io = self.args.folder.io_options();
        let tokens = match has_selector {
            true => self.args.tokens,
            false => self.args.tokens.min(SLOW_TOKENS),
        };
        Ok(RowSpec {
            name: name.to_owned(),
            folder: self.folder.path().to_owned(),
            memory: match memory {
                Memory::Bytes(bytes) => bytes.to_string(),
                Memory::Percent(percent) => format!("{percent}%"),
            },
            limit_bytes,
            selector: selector.name().to_owned(),
            window_tokens: keeps_nothing.then_some(0),
            slots_per_layer: options.slots_per_layer,
            overlap: !has_selector || ["all", "+lookahead"].contains(&name),
            bundling: !["+selector", "+window"].contains(&name) || !self.can_read_apart(),
            lookahead: name == "+lookahead",
            ctx: self.ctx,
            in_flight: io.threads,
            engine: io.engine.to_string(),
            direct: io.direct.into(),
            activity: self
                .activity
                .filter(|_| has_selector)
                .map(|activity| activity.figures),
            guessed: self.args.guessed,
            warmup_tokens: if has_selector { tokens.div_ceil(2) } else { 1 },
            tokens,
        })
    }

    /// `None` where the weights do not fit into memory.
    fn dense_row(&self) -> Result<Option<Measured>> {
        let needed = dense_bytes(&self.folder);
        if available_memory_bytes().is_some_and(|free| free < needed + needed / 20) {
            output::note(&format!(
                "{DENSE_ROW}: left out, {} of weights do not fit into free memory",
                HumanBytes(needed)
            ));
            return Ok(None);
        }
        let model = DenseModel::new(&self.folder)?;
        model.token_ms()?;
        let times: Result<Vec<f64>> = (0..SLOW_TOKENS).map(|_| model.token_ms()).collect();
        Ok(Some(Measured {
            name: DENSE_ROW,
            figures: RowFigures::in_dram(model.bytes, &times?),
            in_cgroup: false,
        }))
    }
}

/// Runs the row in a process of its own.
fn measure(spec: &RowSpec, cgroup: Option<&MemoryCgroup>) -> Result<RowFigures> {
    let program = std::env::current_exe().context("this program's own path")?;
    let mut command = match cgroup {
        Some(group) => group.command(&program),
        None => Command::new(&program),
    };
    command.args(["bench", "row", &serde_json::to_string(spec)?]);
    let output = command.output().with_context(|| starting(&program))?;
    if !output.status.success() {
        let kills = cgroup
            .and_then(|group| group.usage().oom_kills)
            .unwrap_or(0);
        let said = String::from_utf8_lossy(&output.stderr);
        match kills {
            0 => bail!("{}", said.trim().trim_start_matches("wick: ")),
            _ => bail!(
                "killed for using more memory than its budget of {} bytes",
                spec.limit_bytes
            ),
        }
    }
    serde_json::from_slice(&output.stdout).context("the figures of a row")
}

fn starting(program: &Path) -> String {
    format!("starting {}", program.display())
}
