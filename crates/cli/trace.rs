//! `wick trace`: records which neurons each token of a text has.
//!
//! Random weights have no activity worth recording: for a folder that `wick synth` wrote, what is recorded is the made-up
//! history that `wick bench decode` replays, over ids without a meaning.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{bail, ensure, Result};
use candle_wick::HumanBytes;
use candle_wick_models::{record_trace, LoadedModel};
use clap::Args;
use serde::Serialize;

use crate::args::{positive, ModelArgs, OpenedModel, TokenIds};
use crate::interrupt::CtrlC;
use crate::output;
use crate::prompt::{read_file, Prompt};
use crate::synthetic::{activity, made_up, synthetic_name};

#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// File to write: safetensors, see `wick window`
    #[arg(value_name = "OUT")]
    out: PathBuf,

    #[command(flatten)]
    text: TextArgs,

    /// Tokens to record at most, from the start of the text
    #[arg(long, value_name = "COUNT", default_value_t = 4096, value_parser = positive)]
    tokens: usize,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What the model runs over; random weights need no text.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct TextArgs {
    /// File with text like that which the model will see
    #[arg(long, alias = "text", value_name = "FILE")]
    text_file: Option<PathBuf>,

    /// Token ids, such as 1,2,3; needs no tokenizer
    #[arg(long, value_name = "IDS")]
    ids: Option<TokenIds>,
}

/// What was recorded.
#[derive(Serialize)]
struct Report {
    path: String,
    bytes: u64,
    selector: &'static str,
    /// Whether a made-up history stood in for what the selector chose.
    is_replayed: bool,
    layers: usize,
    tokens: usize,
    /// Tokens of one sequence.
    sequence_tokens: usize,
    /// Mean share of the FFN's neurons that a token had.
    selected: f64,
}

pub(crate) fn run(args: &TraceArgs) -> Result<ExitCode> {
    let ctrl_c = CtrlC::watch()?;
    let mut opened = args.model.open(ctrl_c.flag())?;
    let is_synthetic = synthetic_name(&opened.folder)?.is_some();
    // Before the plan: it counts what the process holds already.
    let mut ids = args.ids(&opened, is_synthetic)?;
    let plan = candle_wick_models::plan(&opened.folder, &opened.options)?;
    if is_synthetic && plan.selector.form().is_some() {
        let figures = &activity(&opened.folder.manifest().model_type).figures;
        opened.options.trace = Some(made_up(&opened.folder, &[*figures]));
    }
    let mut model = LoadedModel::load(opened.folder, &opened.options)?;
    ids.truncate(args.tokens);
    ensure!(!ids.is_empty(), "the text has 0 tokens, nothing to record");
    let bar = output::progress_bar(output::COUNT_BAR, false);
    bar.set_length(ids.len() as u64);
    bar.set_message("tokens");
    let on_tokens = |done: usize| bar.set_position(done as u64);
    let written = record_trace(&mut model, &ids, &args.out, &on_tokens);
    bar.finish_and_clear();
    let report = Report {
        path: args.out.display().to_string(),
        bytes: written?,
        selector: plan.selector.name(),
        is_replayed: model.is_replaying(),
        layers: model.folder().manifest().layers.len(),
        tokens: ids.len(),
        sequence_tokens: model.ctx(),
        selected: model.stats().selected_fraction(),
    };
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&report.summary())?,
    }
    Ok(ExitCode::SUCCESS)
}

impl TraceArgs {
    fn ids(&self, opened: &OpenedModel, is_synthetic: bool) -> Result<Vec<u32>> {
        match (&self.text.text_file, &self.text.ids) {
            (Some(path), _) => Prompt::Text(read_file(path)?).encode(opened),
            (_, Some(TokenIds(ids))) => Ok(ids.clone()),
            // Any id will do: the history does not depend on them.
            _ if is_synthetic => Ok(vec![1; self.tokens]),
            _ => bail!("no text: give --text-file FILE or --ids 1,2,3"),
        }
    }
}

impl Report {
    fn summary(&self) -> String {
        let what = match self.is_replayed {
            true => "replayed, for the weights are random",
            false => "chosen",
        };
        format!(
            "{}: {}, {} tokens in sequences of {}, {} layers, {:.1} % of the neurons {what} ({})\n",
            self.path,
            HumanBytes(self.bytes),
            self.tokens,
            self.sequence_tokens,
            self.layers,
            100.0 * self.selected,
            self.selector
        )
    }
}
