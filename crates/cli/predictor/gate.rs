//! `wick predictor gate`: a quantised copy of the deciding matrix as the predictor, which needs no training.

use std::process::ExitCode;

use anyhow::Result;
use candle_wick_convert::predictor::{gate, GateReport};
use candle_wick_models::Interrupt;
use clap::Args;
use wick_kernels::PackedBits;

use super::make::{file_line, MakeArgs};
use super::quality_lines;

#[derive(Args, Debug)]
pub(super) struct GateArgs {
    #[command(flatten)]
    make: MakeArgs,

    /// Bits of a weight: 4, 2 or 1; more find as much by selecting less, and take more memory
    #[arg(long, value_name = "COUNT", default_value = "4", value_parser = bits)]
    bits: PackedBits,
}

fn bits(text: &str) -> Result<PackedBits, String> {
    let count = text.parse().ok().and_then(PackedBits::from_count);
    count.ok_or_else(|| "a weight can have 4, 2 or 1 bits".to_owned())
}

pub(super) fn run(args: &GateArgs, interrupt: Interrupt) -> Result<ExitCode> {
    let make = &args.make;
    let options = make.options(interrupt);
    make.make(
        |on_progress| {
            let (model, text) = (&make.model, &make.text_file);
            gate(model, text, args.bits, &options, on_progress)
        },
        summary,
    )
}

fn summary(report: &GateReport) -> String {
    let mut lines = quality_lines(&report.layers);
    let [fitted, tuned, measured] = report.tokens;
    lines.push(format!(
        "{} bits, packed for {fitted} tokens, thresholds set on {tuned} others, measured on {measured} others",
        report.bits
    ));
    lines.push(file_line(&report.path, report.bytes));
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
