//! `wick bench prompt`: what prompts of several lengths read and take, from a model that was just loaded.
//!
//! A prompt goes through the layers in chunks; each chunk reads the union of what its tokens select, in file order. Beside
//! each prompt stand that union and the time of reading the whole FFN once, in order: what an engine would take that
//! streams the layers through. The tokens decoded behind the prompt say what a token of it would have cost alone.
//!
//! Each length is a process of its own, in a memory cgroup of exactly its budget where one can be made, so its cache is
//! cold.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{ensure, Context, Result};
use candle_wick::Memory;
use clap::Args;
use serde::Serialize;

use super::cgroup::MemoryCgroup;
use super::decode::describe;
use super::row::{RowFigures, RowSpec, TextSpec, TokenFigures};
use super::subject::{Subject, SubjectArgs};
use super::table::peak_of_budget;
use crate::args::positive;
use crate::interrupt::{CtrlC, INTERRUPTED_STATUS};
use crate::machine::Machine;
use crate::output;
use crate::probe::Rates;
use crate::prompt::read_file;
use crate::spread::Spread;

/// Tokens decoded behind each prompt.
const DECODED: usize = 8;

#[derive(Args, Debug)]
pub(crate) struct PromptArgs {
    #[command(flatten)]
    subject: SubjectArgs,

    /// Tokens of the prompts; longer ones than the model's context are left out
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        value_parser = positive,
        default_values_t = [8, 16, 32, 128, 512, 2048]
    )]
    tokens: Vec<usize>,

    /// Budget; the KV cache of the longest prompt comes on top of a share of the weights
    #[arg(long, value_name = "SIZE", default_value = "50%")]
    memory: Memory,

    /// Text to take the prompts from; random weights do with ids that follow no pattern
    #[arg(long, alias = "text", value_name = "FILE")]
    text_file: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A whole run.
#[derive(Serialize)]
struct PromptBench {
    model: String,
    synthetic: Option<String>,
    activity: Option<&'static str>,
    memory: String,
    /// Who left the neuron cache.
    cache_policy: &'static str,
    ctx: usize,
    /// Whether prompts are missing because somebody stopped the run.
    is_interrupted: bool,
    machine: Machine,
    rates: Rates,
    /// Records of all neurons.
    ffn_bytes: u64,
    rows: Vec<Row>,
}

/// One prompt.
#[derive(Serialize)]
struct Row {
    tokens: usize,
    /// Share of the FFN's neurons that a token selects, and that the chunks' unions come to, added up.
    selected: f64,
    union: f64,
    bytes_read: f64,
    first_token_ms: f64,
    io_ms: f64,
    compute_ms_per_token: f64,
    /// Of the tokens decoded behind the prompt.
    decode_compute_ms: f64,
    decode_ms: f64,
    peak_bytes: Option<u64>,
    budget_bytes: Option<u64>,
    reads: Option<String>,
    in_cgroup: bool,
}

pub(crate) fn run(args: &PromptArgs) -> Result<ExitCode> {
    let ctrl_c = CtrlC::watch()?;
    let subject = Subject::open(&args.subject)?;
    let ids = ids(args, &subject)?;
    let longest = args.tokens.iter().copied().max().unwrap_or(0);
    // The longest prompt may fill the model's context, with no room to decode behind it.
    let ctx = subject
        .ctx_up_to(longest + DECODED)?
        .max(subject.ctx_up_to(longest)?);
    let fits = args.tokens.iter().any(|tokens| *tokens <= ctx);
    ensure!(fits, "no prompt fits into a context of {ctx}");
    let spec = subject.spec(&subject.options(args.memory, ctx))?;
    let mut rates = subject.rates()?;
    ctrl_c.arm();
    let is_stopped = || ctrl_c.flag().is_triggered();
    let mut rows = Vec::new();
    let mut status = ExitCode::SUCCESS;
    for &tokens in &args.tokens {
        if tokens > ctx {
            output::note(&format!("{tokens} tokens: left out, the context is {ctx}"));
            continue;
        }
        if is_stopped() {
            break;
        }
        match row(&spec, &ids, tokens) {
            Ok(row) => {
                output::note(&format!("{tokens} tokens: {:.0} ms", row.first_token_ms));
                rows.push(row);
            }
            // The process got the same Ctrl-C.
            Err(_) if is_stopped() => break,
            // The others are worth having.
            Err(error) => {
                output::complain(&format!("{tokens} tokens: {}", output::one_line(&error)));
                status = ExitCode::FAILURE;
            }
        }
    }
    if !is_stopped() {
        rates.keep_best(subject.rates()?);
    }
    if rows.is_empty() && is_stopped() {
        return Ok(ExitCode::from(INTERRUPTED_STATUS));
    }
    ensure!(!rows.is_empty(), "no prompt could be measured");
    if is_stopped() {
        status = ExitCode::from(INTERRUPTED_STATUS);
    }
    let layers = &subject.folder.manifest().layers;
    let bench = PromptBench {
        model: subject.folder.path().display().to_string(),
        activity: subject.activity.map(|activity| activity.source),
        synthetic: subject.synthetic,
        memory: describe(args.memory),
        cache_policy: args.subject.cache_policy.name(),
        ctx,
        is_interrupted: is_stopped(),
        machine: Machine::this(),
        rates,
        ffn_bytes: layers.iter().map(|layer| layer.records_bytes()).sum(),
        rows,
    };
    match args.json {
        true => output::print_json(&bench)?,
        false => output::print(&bench.to_string())?,
    }
    Ok(status)
}

/// A prompt of so many tokens, and some tokens behind it.
fn row(spec: &RowSpec, ids: &[u32], tokens: usize) -> Result<Row> {
    let prompt = ids.iter().copied().cycle().take(tokens).collect();
    let spec = RowSpec {
        text: Some(TextSpec {
            prompt,
            top_p: None,
        }),
        tokens: DECODED.min(spec.ctx - tokens),
        ..spec.clone()
    };
    let cgroup = MemoryCgroup::new(spec.limit_bytes);
    let figures = spec.in_own_process(cgroup.as_ref())?;
    Row::new(tokens, figures, cgroup.is_some())
}

/// The ids that prompts are made of, over and over.
fn ids(args: &PromptArgs, subject: &Subject) -> Result<Vec<u32>> {
    let Some(path) = &args.text_file else {
        ensure!(
            subject.synthetic.is_some(),
            "a real model chooses its neurons by what it reads: --text-file FILE"
        );
        // Below any vocabulary's size.
        return Ok((3..1003).collect());
    };
    let tokenizer = subject.tokenizer()?;
    let ids = tokenizer.encode(&read_file(path)?)?;
    ensure!(!ids.is_empty(), "{} has no tokens", path.display());
    Ok(ids)
}

impl Row {
    fn new(tokens: usize, figures: RowFigures, in_cgroup: bool) -> Result<Self> {
        let prompt = figures.prompt.context("a row without its prompt")?;
        let decoded =
            |of: fn(&TokenFigures) -> f64| Spread::of(figures.tokens.iter().map(of)).median;
        Ok(Self {
            tokens,
            selected: prompt.selected,
            union: prompt.needed,
            bytes_read: prompt.bytes_read,
            first_token_ms: prompt.total_ms,
            io_ms: prompt.io_ms,
            compute_ms_per_token: prompt.compute_ms() / tokens as f64,
            decode_compute_ms: decoded(TokenFigures::compute_ms),
            decode_ms: decoded(|token| token.total_ms),
            peak_bytes: figures.peak_bytes,
            budget_bytes: figures.budget_bytes,
            reads: figures.reads,
            in_cgroup,
        })
    }

    /// How many times as fast as a decoded token one of the prompt is computed.
    fn compute_speedup(&self) -> f64 {
        self.decode_compute_ms / self.compute_ms_per_token
    }
}

impl fmt::Display for PromptBench {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match (&self.synthetic, self.activity) {
            (Some(name), Some(source)) => {
                format!("synthetic weights ({name}), replayed trace with the figures of {source}")
            }
            _ => "real weights".to_owned(),
        };
        let in_order = self.rates.sequential.bytes_per_s.median;
        let stream_ms = 1000.0 * self.ffn_bytes as f64 / in_order;
        writeln!(f, "{}: {kind}\n{}", self.model, self.machine)?;
        writeln!(
            f,
            "budget {}, context {}, cache {}\nthe FFN, {:.2} GB, read once in order at the probed {:.2} GB/s: {stream_ms:.0} ms\n",
            self.memory,
            self.ctx,
            self.cache_policy,
            self.ffn_bytes as f64 / 1e9,
            in_order / 1e9
        )?;
        writeln!(
            f,
            "| tokens | selected | union | GB read | of the FFN | first token ms | beside streaming | ms a token | compute ms a token | \
             decoding, compute ms | as fast |\n|---|---|---|---|---|---|---|---|---|---|---|"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "| {} | {:.1} % | {:.1} % | {:.3} | {:.1} % | {:.1} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
                row.tokens,
                100.0 * row.selected,
                100.0 * row.union,
                row.bytes_read / 1e9,
                100.0 * row.bytes_read / self.ffn_bytes as f64,
                row.first_token_ms,
                row.first_token_ms / stream_ms,
                row.first_token_ms / row.tokens as f64,
                row.compute_ms_per_token,
                row.decode_compute_ms,
                row.compute_speedup()
            )?;
        }
        writeln!(f)?;
        if self.is_interrupted {
            writeln!(f, "interrupted: what was measured until then")?;
        }
        for row in &self.rows {
            if let Some(peak) = peak_of_budget(row.peak_bytes, row.budget_bytes, row.in_cgroup) {
                let reads = row.reads.as_deref().unwrap_or("no reads");
                writeln!(f, "{} tokens: {peak}, {reads}", row.tokens)?;
            }
        }
        Ok(())
    }
}
