//! `wick predictor fit`: low-rank predictors in closed form.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_wick::{HumanBytes, Memory};
use candle_wick_convert::predictor::{fit, FitOptions, FitReport};
use candle_wick_models::Interrupt;
use clap::Args;

use super::{quality_lines, refuse_demo, with_progress};
use crate::args::{positive, share};
use crate::output;

#[derive(Args, Debug)]
pub(super) struct FitArgs {
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

    /// Write the predictors into FILE [default: into the model's folder, in the place of those that it has]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &FitArgs, interrupt: Interrupt) -> Result<ExitCode> {
    refuse_demo(&args.model)?;
    let options = FitOptions {
        rank: args.rank,
        recall: args.recall,
        tokens: args.tokens,
        memory: args.memory,
        out: args.out.clone(),
        interrupt,
    };
    let report =
        with_progress(|on_progress| fit(&args.model, &args.text_file, &options, on_progress))?;
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&summary(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(report: &FitReport) -> String {
    let mut lines = quality_lines(&report.layers);
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
