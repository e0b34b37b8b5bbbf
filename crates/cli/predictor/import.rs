//! `wick predictor import`: predictors that PowerInfer's or Deja Vu's programs were trained with.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_wick::{Memory, PredictorInput};
use candle_wick_convert::predictor::{import, ImportOptions, ImportReport};
use candle_wick_models::{Interrupt, WickTokenizer};
use clap::Args;

use super::make::file_line;
use super::{quality_lines, refuse_demo, with_progress, TextArgs};
use crate::args::{number, positive};
use crate::output;

#[derive(Args, Debug)]
pub(super) struct ImportArgs {
    /// Converted folder
    model: PathBuf,

    /// Folder with a PyTorch file for each layer: model_N.pt (PowerInfer) or ...layerN....pt (Deja Vu)
    #[arg(value_name = "PATH")]
    from: PathBuf,

    #[command(flatten)]
    text: TextArgs,

    /// What they were trained to look at: ffn_input, attention_residual or layer_input [default: attention_residual;
    /// layer_input for PowerInfer's Falcon]
    #[arg(long, value_name = "NAME")]
    input: Option<PredictorInput>,

    /// Scores that reach this select [default: what config.json says, else 0]
    #[arg(long, value_name = "SCORE", allow_hyphen_values = true, value_parser = score)]
    threshold: Option<f64>,

    /// Tokens of the text to measure on at most, from its start
    #[arg(long, value_name = "COUNT", default_value_t = 8192, value_parser = positive)]
    tokens: usize,

    /// Budget of the model while it runs [default: what is free]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,

    /// File to write [default: predictors.safetensors in the model's folder]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &ImportArgs, interrupt: Interrupt) -> Result<ExitCode> {
    refuse_demo(&args.model)?;
    let mut ids = args.text.ids(|| {
        WickTokenizer::load(&args.model)?.with_context(|| {
            let folder = args.model.display();
            format!("{folder} has no tokenizer.json, which a text needs: give --ids")
        })
    })?;
    ids.truncate(args.tokens);
    let options = ImportOptions {
        input: args.input,
        threshold: args.threshold.map(|score| score as f32),
        memory: args.memory,
        out: args.out.clone(),
        interrupt,
    };
    let report =
        with_progress(|progress| import(&args.model, &args.from, &ids, &options, progress))?;
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&summary(&report))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn score(text: &str) -> Result<f64, String> {
    number(
        text,
        |value| value.abs() <= 1e6,
        "between -1000000 and 1000000",
    )
}

fn summary(report: &ImportReport) -> String {
    let mut lines = quality_lines(&report.layers);
    let ranks = report.ranks.iter();
    let (least, most) = (ranks.clone().min(), ranks.max());
    lines.push(format!(
        "from {}, ranks {} to {}, input {}, {} between; measured on {} tokens",
        report.made_by,
        least.unwrap_or(&0),
        most.unwrap_or(&0),
        report.input,
        report.between,
        report.tokens
    ));
    lines.push(file_line(&report.path, report.bytes));
    lines.join("\n") + "\n"
}
