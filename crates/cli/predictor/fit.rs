//! `wick predictor fit`: low-rank predictors in closed form.

use std::process::ExitCode;

use anyhow::Result;
use candle_wick_convert::predictor::{fit, FitOptions, FitReport};
use candle_wick_models::Interrupt;
use clap::Args;

use super::make::{file_line, MakeArgs};
use super::quality_lines;
use crate::args::positive;

#[derive(Args, Debug)]
pub(super) struct FitArgs {
    #[command(flatten)]
    make: MakeArgs,

    /// Rank of each layer's predictor: higher finds more for less, and takes more memory
    #[arg(long, default_value_t = FitOptions::default().rank, value_parser = positive)]
    rank: usize,
}

pub(super) fn run(args: &FitArgs, interrupt: Interrupt) -> Result<ExitCode> {
    let make = &args.make;
    let options = FitOptions {
        rank: args.rank,
        ..make.options(interrupt)
    };
    make.make(
        |on_progress| fit(&make.model, &make.text_file, &options, on_progress),
        summary,
    )
}

fn summary(report: &FitReport) -> String {
    let mut lines = quality_lines(&report.layers);
    let [fitted, tuned, measured] = report.tokens;
    lines.push(format!(
        "rank {}, fitted on {fitted} tokens, thresholds set on {tuned} others, measured on {measured} others",
        report.rank
    ));
    lines.push(file_line(&report.path, report.bytes));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use candle_wick_convert::predictor::LayerQuality;

    use super::*;

    #[test]
    fn the_summary_has_a_line_for_each_layer_their_mean_and_the_file() {
        let report = FitReport {
            path: "m/predictors.safetensors".into(),
            bytes: 2048,
            rank: 8,
            tokens: [80, 10, 10],
            layers: vec![LayerQuality::default(); 2],
        };
        let summary = summary(&report);
        assert_eq!(summary.lines().count(), 6);
        assert!(
            summary.ends_with("m/predictors.safetensors (2.0 KiB)\n"),
            "{summary}"
        );
    }
}
