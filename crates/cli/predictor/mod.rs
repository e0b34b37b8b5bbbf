//! `wick predictor`: makes the predictors that let a model skip neurons.
//!
//! Each command is a file here; what they share is below.

mod eval;
mod fit;
mod train;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{ensure, Result};
use candle_wick_convert::predictor::{FitProgress, LayerQuality};
use clap::{Args, Subcommand};

use crate::output;

#[derive(Args, Debug)]
pub(crate) struct PredictorArgs {
    #[command(subcommand)]
    command: PredictorCommand,
}

#[derive(Subcommand, Debug)]
enum PredictorCommand {
    /// Fit low-rank predictors on a text and write them into the model's folder
    Fit(fit::FitArgs),
    /// Train low-rank predictors on a text, starting from those that `fit` would make
    Train(train::TrainArgs),
    /// Show what a model's selector finds and misses on a text, by layer
    Eval(eval::EvalArgs),
}

pub(crate) fn run(args: &PredictorArgs) -> Result<ExitCode> {
    match &args.command {
        PredictorCommand::Fit(args) => fit::run(args),
        PredictorCommand::Train(args) => train::run(args),
        PredictorCommand::Eval(args) => eval::run(args),
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
