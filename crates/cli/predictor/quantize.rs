//! `wick predictor quantize`: low-rank predictors in 8 bits a weight, half of what they take as they are made.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_wick::HumanBytes;
use candle_wick_convert::predictor::{quantize, QuantizeReport};
use candle_wick_models::Interrupt;
use clap::Args;

use super::make::{file_line, MakeArgs};
use super::quality_lines;

#[derive(Args, Debug)]
pub(super) struct QuantizeArgs {
    #[command(flatten)]
    make: MakeArgs,

    /// Low-rank predictors to start from [default: those in the folder]
    #[arg(long, value_name = "FILE")]
    predictors: Option<PathBuf>,
}

pub(super) fn run(args: &QuantizeArgs, interrupt: Interrupt) -> Result<ExitCode> {
    let make = &args.make;
    let options = make.options(interrupt);
    let predictors = args.predictors.as_deref();
    make.make(
        |on_progress| {
            let (model, text) = (&make.model, &make.text_file);
            quantize(model, predictors, text, &options, on_progress)
        },
        summary,
    )
}

fn summary(report: &QuantizeReport) -> String {
    let mut lines = quality_lines(&report.layers);
    let ([tuned, measured], [before, after]) = (report.tokens, report.dram_bytes);
    lines.push(format!(
        "8 bits, {} in memory for {} before, thresholds set on {tuned} tokens, measured on {measured} others",
        HumanBytes(after),
        HumanBytes(before)
    ));
    lines.push(file_line(&report.path, report.bytes));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use candle_wick_convert::predictor::LayerQuality;

    use super::*;

    #[test]
    fn the_summary_says_what_was_saved_and_where() {
        let report = QuantizeReport {
            path: "m/predictors.safetensors".into(),
            bytes: 2048,
            dram_bytes: [2048, 1024],
            tokens: [10, 10],
            layers: vec![LayerQuality::default(); 2],
        };
        let summary = summary(&report);
        assert!(
            summary.contains("\n8 bits, 1.0 KiB in memory for 2.0 KiB before"),
            "{summary}"
        );
        assert!(
            summary.ends_with("m/predictors.safetensors (2.0 KiB)\n"),
            "{summary}"
        );
    }
}
