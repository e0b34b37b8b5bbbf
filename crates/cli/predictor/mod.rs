//! `wick predictor`: makes the predictors that let a model skip neurons.
//!
//! Each command is a file here; what they share is below.

mod eval;
mod fit;
mod gate;
mod import;
mod make;
mod quantize;
mod train;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, ensure, Result};
use candle_wick_convert::predictor::{FitProgress, LayerQuality};
use candle_wick_models::WickTokenizer;
use clap::{Args, Subcommand};

use crate::args::TokenIds;
use crate::interrupt::{CtrlC, INTERRUPTED_STATUS};
use crate::output;
use crate::prompt::read_file;

#[derive(Args, Debug)]
pub(crate) struct PredictorArgs {
    #[command(subcommand)]
    command: PredictorCommand,
}

#[derive(Subcommand, Debug)]
enum PredictorCommand {
    /// Fit low-rank predictors on a text and write them into the model's folder
    Fit(fit::FitArgs),
    /// Quantise the matrix that decides which neurons are active: a predictor that needs no training
    Gate(gate::GateArgs),
    /// Store low-rank predictors in 8 bits a weight
    Quantize(quantize::QuantizeArgs),
    /// Train low-rank predictors on a text, starting from those that `fit` would make
    Train(train::TrainArgs),
    /// Take over predictors that PowerInfer or Deja Vu trained, and measure them on a text
    Import(import::ImportArgs),
    /// Show what a model's selector finds and misses on a text, by layer
    Eval(eval::EvalArgs),
}

/// The text that predictors are measured on.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct TextArgs {
    /// File with text that the predictors have not seen
    #[arg(long, alias = "text", value_name = "FILE")]
    text_file: Option<PathBuf>,

    /// Token ids, such as 1,2,3; needs no tokenizer
    #[arg(long, value_name = "IDS")]
    ids: Option<TokenIds>,
}

impl TextArgs {
    /// Its tokens; a text is encoded by what `tokenizer` gives.
    fn ids(&self, tokenizer: impl FnOnce() -> Result<WickTokenizer>) -> Result<Vec<u32>> {
        match (&self.text_file, &self.ids) {
            (Some(path), _) => Ok(tokenizer()?.encode(&read_file(path)?)?),
            (_, Some(TokenIds(ids))) => Ok(ids.clone()),
            _ => bail!("no text: give --text-file FILE or --ids 1,2,3"),
        }
    }
}

pub(crate) fn run(args: &PredictorArgs) -> Result<ExitCode> {
    // The first Ctrl-C ends the work and takes its drafts away; the second one ends the program.
    let ctrl_c = CtrlC::watch()?;
    ctrl_c.arm();
    let flag = ctrl_c.flag();
    let done = match &args.command {
        PredictorCommand::Fit(args) => fit::run(args, flag),
        PredictorCommand::Gate(args) => gate::run(args, flag),
        PredictorCommand::Quantize(args) => quantize::run(args, flag),
        PredictorCommand::Train(args) => train::run(args, flag),
        PredictorCommand::Import(args) => import::run(args, flag),
        PredictorCommand::Eval(args) => eval::run(args, flag),
    };
    match done {
        Err(_) if ctrl_c.flag().is_triggered() => Ok(ExitCode::from(INTERRUPTED_STATUS)),
        done => done,
    }
}

/// The demo's folder is its own.
fn refuse_demo(model: &Path) -> Result<()> {
    ensure!(
        model != Path::new("demo"),
        "demo has its predictors already; convert assets/opt-9m to fit your own"
    );
    Ok(())
}

/// Runs `make` under a bar on stderr that it moves.
fn with_progress<T, E>(make: impl FnOnce(&dyn Fn(FitProgress)) -> Result<T, E>) -> Result<T, E> {
    let bar = output::progress_bar(output::COUNT_BAR, false);
    let made = make(&|progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.step);
    });
    bar.finish_and_clear();
    made
}

/// A table of what predictors find: a head, a line for each layer, and their mean.
fn quality_lines(layers: &[LayerQuality]) -> Vec<String> {
    let mut lines = vec!["layer  recall    active  selected  by any of 5 tokens".to_owned()];
    let line = |label: &str, quality: &LayerQuality| {
        format!(
            "{label:>5}  {:>6.3}  {:>6.1} %  {:>6.1} %  {:>16.1} %",
            quality.recall,
            100.0 * quality.active_fraction,
            100.0 * quality.selected_fraction,
            100.0 * quality.union_fraction
        )
    };
    for (index, quality) in layers.iter().enumerate() {
        lines.push(line(&index.to_string(), quality));
    }
    lines.push(line("mean", &mean(layers)));
    lines
}

fn mean(layers: &[LayerQuality]) -> LayerQuality {
    let of = |value: fn(&LayerQuality) -> f32| {
        layers.iter().map(value).sum::<f32>() / layers.len().max(1) as f32
    };
    LayerQuality {
        threshold: of(|layer| layer.threshold),
        recall: of(|layer| layer.recall),
        active_fraction: of(|layer| layer.active_fraction),
        selected_fraction: of(|layer| layer.selected_fraction),
        union_fraction: of(|layer| layer.union_fraction),
        ..LayerQuality::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_layer_and_their_mean() {
        let layer = |recall| LayerQuality {
            recall,
            ..LayerQuality::default()
        };
        let lines = quality_lines(&[layer(0.9), layer(1.0)]);
        assert_eq!(lines.len(), 4);
        assert!(lines[3].starts_with(" mean   0.950"), "{lines:?}");
    }
}
