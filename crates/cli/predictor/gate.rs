//! `wick predictor gate`: a quantised copy of the deciding matrix as the predictor, which needs no training.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_wick::{HumanBytes, Memory};
use candle_wick_convert::predictor::{gate, FitOptions, GateReport};
use candle_wick_models::Interrupt;
use clap::Args;
use wick_kernels::PackedBits;

use super::{quality_lines, refuse_demo, with_progress};
use crate::args::{positive, share};
use crate::output;

#[derive(Args, Debug)]
pub(super) struct GateArgs {
    /// Converted folder
    model: PathBuf,

    /// File with text like that which the model will see
    #[arg(long, alias = "text", value_name = "FILE")]
    text_file: PathBuf,

    /// Bits of a weight: 4, 2 or 1; more find as much by selecting less, and take more memory
    #[arg(long, value_name = "COUNT", default_value = "4", value_parser = bits)]
    bits: PackedBits,

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

fn bits(text: &str) -> Result<PackedBits, String> {
    let count = text.parse().ok().and_then(PackedBits::from_count);
    count.ok_or_else(|| "a weight can have 4, 2 or 1 bits".to_owned())
}

pub(super) fn run(args: &GateArgs, interrupt: Interrupt) -> Result<ExitCode> {
    refuse_demo(&args.model)?;
    let options = FitOptions {
        recall: args.recall,
        tokens: args.tokens,
        memory: args.memory,
        out: args.out.clone(),
        interrupt,
        ..FitOptions::default()
    };
    let report = with_progress(|on_progress| {
        gate(
            &args.model,
            &args.text_file,
            args.bits,
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

fn summary(report: &GateReport) -> String {
    let mut lines = quality_lines(&report.layers);
    let [fitted, tuned, measured] = report.tokens;
    lines.push(format!(
        "{} bits, packed for {fitted} tokens, thresholds set on {tuned} others, measured on {measured} others",
        report.bits
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
    fn bits_are_those_that_there_are_kernels_for() {
        assert_eq!(bits("2"), Ok(PackedBits::Two));
        for text in ["3", "8", "0", "-1", "four", ""] {
            assert!(bits(text).unwrap_err().contains("4, 2 or 1"), "{text}");
        }
    }

    #[test]
    fn the_summary_says_how_many_bits_and_where() {
        let report = GateReport {
            path: "m/predictors.safetensors".into(),
            bytes: 2048,
            bits: 2,
            tokens: [80, 10, 10],
            layers: vec![LayerQuality::default(); 2],
        };
        let summary = summary(&report);
        assert!(
            summary.contains("\n2 bits, packed for 80 tokens"),
            "{summary}"
        );
        assert!(
            summary.ends_with("m/predictors.safetensors (2.0 KiB)\n"),
            "{summary}"
        );
    }
}
