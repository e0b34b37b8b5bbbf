//! `wick predictor`: makes the predictors that let a model skip neurons.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{ensure, Result};
use candle_wick::{HumanBytes, Memory};
use candle_wick_convert::predictor::{fit, FitOptions, FitProgress, FitReport, LayerQuality};
use clap::{Args, Subcommand};

use crate::args::{positive, share};
use crate::output;

#[derive(Args, Debug)]
pub(crate) struct PredictorArgs {
    #[command(subcommand)]
    command: PredictorCommand,
}

#[derive(Subcommand, Debug)]
enum PredictorCommand {
    /// Fit low-rank predictors on a text and write them into the model's folder
    Fit(FitArgs),
}

#[derive(Args, Debug)]
struct FitArgs {
    /// Converted folder
    model: PathBuf,

    /// File with text like that which the model will see
    #[arg(long, alias = "text", value_name = "FILE")]
    text_file: PathBuf,

    /// Rank of each layer's predictor: higher finds more for less, and takes more memory
    #[arg(long, default_value_t = FitOptions::default().rank, value_parser = positive)]
    rank: usize,

    /// Share of the active neurons to be found
    #[arg(long, value_name = "SHARE", default_value_t = FitOptions::default().recall, value_parser = share)]
    recall: f64,

    /// Tokens of the text to use at most
    #[arg(long, value_name = "COUNT", default_value_t = FitOptions::default().tokens, value_parser = positive)]
    tokens: usize,

    /// Budget of the model while it runs [default: what is free]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PredictorArgs) -> Result<ExitCode> {
    let PredictorCommand::Fit(args) = &args.command;
    ensure!(
        args.model != Path::new("demo"),
        "demo has its predictors already; convert assets/opt-9m to fit your own"
    );
    let options = FitOptions {
        rank: args.rank,
        recall: args.recall,
        tokens: args.tokens,
        memory: args.memory,
        ..FitOptions::default()
    };
    let bar = output::progress_bar(output::COUNT_BAR, false);
    let on_progress = |progress: FitProgress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.step);
    };
    let report = fit(&args.model, &args.text_file, &options, &on_progress);
    bar.finish_and_clear();
    let report = report?;
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&summary(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(report: &FitReport) -> String {
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
    for (index, quality) in report.layers.iter().enumerate() {
        lines.push(line(&index.to_string(), quality));
    }
    lines.push(line("mean", &mean(&report.layers)));
    let [fitted, tuned, measured] = report.tokens;
    lines.push(format!(
        "rank {}, fitted on {fitted} tokens, thresholds set on {tuned} others, measured on {measured} others",
        report.rank
    ));
    lines.push(format!(
        "{} ({})",
        report.path.display(),
        HumanBytes(report.bytes)
    ));
    lines.join("\n") + "\n"
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
    fn the_summary_has_a_line_for_each_layer_and_their_mean() {
        let layer = |recall| LayerQuality {
            recall,
            ..LayerQuality::default()
        };
        let report = FitReport {
            path: "m/predictors.safetensors".into(),
            bytes: 2048,
            rank: 8,
            tokens: [80, 10, 10],
            layers: vec![layer(0.9), layer(1.0)],
        };
        let summary = summary(&report);
        assert_eq!(summary.lines().count(), 6);
        assert!(summary.contains(" mean   0.950"), "{summary}");
    }
}
