//! `wick predictor quantize`: low-rank predictors in 8 bits a weight, half of what they take as they are made.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_wick::{HumanBytes, Memory};
use candle_wick_convert::predictor::{quantize, FitOptions, QuantizeReport};
use candle_wick_models::Interrupt;
use clap::Args;

use super::{quality_lines, refuse_demo, with_progress};
use crate::args::{positive, share};
use crate::output;

#[derive(Args, Debug)]
pub(super) struct QuantizeArgs {
    /// Converted folder
    model: PathBuf,

    /// File with text like that which the model will see, for the thresholds
    #[arg(long, alias = "text", value_name = "FILE")]
    text_file: PathBuf,

    /// Low-rank predictors to start from [default: those in the folder]
    #[arg(long, value_name = "FILE")]
    predictors: Option<PathBuf>,

    /// Share of the active neurons to be found
    #[arg(long, value_name = "SHARE", default_value_t = FitOptions::default().recall, value_parser = share)]
    recall: f64,

    /// Tokens of the text to use at most
    #[arg(long, value_name = "COUNT", default_value_t = FitOptions::default().tokens, value_parser = positive)]
    tokens: usize,

    /// Budget of the model while it runs [default: what is free]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,

    /// Write the predictors into FILE [default: into the model's folder, in the place of those that it has]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &QuantizeArgs, interrupt: Interrupt) -> Result<ExitCode> {
    refuse_demo(&args.model)?;
    let options = FitOptions {
        recall: args.recall,
        tokens: args.tokens,
        memory: args.memory,
        out: args.out.clone(),
        interrupt,
        ..FitOptions::default()
    };
    let predictors = args.predictors.as_deref();
    let report = with_progress(|on_progress| {
        quantize(
            &args.model,
            predictors,
            &args.text_file,
            &options,
            on_progress,
        )
    })?;
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&summary(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(report: &QuantizeReport) -> String {
    let mut lines = quality_lines(&report.layers);
    let ([tuned, measured], [before, after]) = (report.tokens, report.dram_bytes);
    lines.push(format!(
        "8 bits, {} in memory for {} before, thresholds set on {tuned} tokens, measured on {measured} others",
        HumanBytes(after),
        HumanBytes(before)
    ));
    lines.push(format!(
        "{} ({})",
        report.path.display(),
        HumanBytes(report.bytes)
    ));
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
