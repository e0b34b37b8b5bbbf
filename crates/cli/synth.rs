//! `wick synth`: a folder with random weights, as large as a real model, for measuring.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use candle_wick::{peak_rss_bytes, HumanBytes};
use candle_wick_convert::synthetic::{synthesise, Geometry, SyntheticOptions};
use candle_wick_convert::ConvertProgress;
use clap::Args;
use serde::Serialize;

use crate::convert::LayoutChoice;
use crate::output;

#[derive(Args, Debug)]
pub(crate) struct SynthArgs {
    /// Folder to write; one that is unfinished is taken up where it stopped
    out: PathBuf,

    /// Model whose shapes to take, such as opt-6.7b; a name that is not known lists all
    #[arg(long, value_name = "NAME", value_parser = Geometry::find)]
    like: &'static Geometry,

    /// Element type of all weights
    #[arg(long, default_value = "f16", value_parser = ["f16", "bf16", "f32"])]
    dtype: String,

    /// Records that an FFN is stored in: neuron, channel or both, as for `wick convert`
    #[arg(long, value_name = "NAME", default_value = "neuron")]
    layout: LayoutChoice,

    /// Write the first COUNT layers only
    #[arg(long, value_name = "COUNT")]
    layers: Option<usize>,

    /// Number that the weights are made from
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Print errors only
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
}

/// What was written, and what that took.
#[derive(Serialize)]
struct Report {
    path: String,
    like: &'static str,
    dtype: String,
    layers: usize,
    seed: u64,
    ffn_bytes: u64,
    resident_bytes: u64,
    predictor_bytes: u64,
    seconds: f64,
    peak_bytes: Option<u64>,
    notes: Vec<String>,
}

pub(crate) fn run(args: &SynthArgs) -> Result<ExitCode> {
    let options = SyntheticOptions {
        dtype: args.dtype.as_str().try_into()?,
        layout: args.layout.layout(),
        layers: args.layers,
        seed: args.seed,
    };
    let started = Instant::now();
    let bar = output::progress_bar(output::BYTES_BAR, args.quiet);
    let on_progress = |progress: ConvertProgress<'_>| output::show_progress(&bar, progress);
    let written = synthesise(args.like, &args.out, &options, &on_progress);
    bar.finish_and_clear();
    let written = written?;
    let report = Report {
        path: args.out.display().to_string(),
        like: args.like.name,
        dtype: args.dtype.clone(),
        layers: written.folder.layers,
        seed: args.seed,
        ffn_bytes: written.folder.ffn_bytes,
        resident_bytes: written.folder.resident_bytes,
        predictor_bytes: written.predictor_bytes,
        seconds: started.elapsed().as_secs_f64(),
        peak_bytes: peak_rss_bytes(),
        notes: written.folder.notes,
    };
    if args.json {
        output::print_json(&report)?;
    } else if !args.quiet {
        output::print(&report.summary())?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn summary(&self) -> String {
        let peak = self.peak_bytes.map_or(String::new(), |bytes| {
            format!(", peak memory {}", HumanBytes(bytes))
        });
        let mut lines = vec![
            format!(
                "{}: {} in {}, {} layers, {} of FFN records, {} resident, {} of predictors",
                self.path,
                self.like,
                self.dtype,
                self.layers,
                HumanBytes(self.ffn_bytes),
                HumanBytes(self.resident_bytes),
                HumanBytes(self.predictor_bytes)
            ),
            format!("written in {:.1} s{peak}", self.seconds),
        ];
        lines.extend(self.notes.iter().map(|note| format!("note: {note}")));
        lines.join("\n") + "\n"
    }
}
