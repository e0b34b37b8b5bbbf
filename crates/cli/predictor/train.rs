//! `wick predictor train`: predictors that have learnt from a text.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle::Device;
use candle_wick::Memory;
use candle_wick_convert::predictor::{
    train, FitOptions, LayerQuality, TrainOptions, TrainReport, TrainedLayer,
};
use candle_wick_models::Interrupt;
use clap::Args;

use super::make::file_line;
use super::{mean, refuse_demo, with_progress};
use crate::args::{count, number, positive, share};
use crate::output;

#[derive(Args, Debug)]
pub(super) struct TrainArgs {
    /// Converted folder
    model: PathBuf,

    /// Files with text like that which the model will see; the last tenth of each is what the result is measured on
    #[arg(long, alias = "text", value_name = "FILES", num_args = 1.., required = true)]
    text_file: Vec<PathBuf>,

    /// Highest rank of a layer's predictor; the cheapest of it, its half, quarter and eighth is trained
    #[arg(long, default_value_t = TrainOptions::default().fit.rank, value_parser = positive)]
    rank: usize,

    /// How many layers at the end have a highest rank of their own
    #[arg(long, value_name = "COUNT", default_value_t = TrainOptions::default().last_layers, value_parser = count)]
    last_layers: usize,

    /// That rank; no predictor is larger than the matrix it stands for
    #[arg(long, value_name = "RANK", default_value_t = TrainOptions::default().last_rank, value_parser = positive)]
    last_rank: usize,

    /// Train the highest ranks themselves
    #[arg(long)]
    keep_rank: bool,

    /// Share of the active neurons to be found: ranks, thresholds and the end of learning go by it
    #[arg(long, alias = "recall", value_name = "SHARE", default_value_t = TrainOptions::default().fit.recall, value_parser = share)]
    target_recall: f64,

    /// Thresholds for the predictor's own probability, as in the paper (0.4 to 0.7), instead of those that reach the
    /// recall; several are measured, the first is written
    #[arg(long, value_name = "VALUES", value_delimiter = ',', value_parser = probability)]
    threshold: Vec<f64>,

    /// Times that the text is gone through at most; 0 leaves the start as it is
    #[arg(long, value_name = "COUNT", default_value_t = TrainOptions::default().epochs, value_parser = count)]
    epochs: usize,

    /// Step size at its largest
    #[arg(long, value_name = "RATE", default_value_t = TrainOptions::default().learning_rate, value_parser = rate)]
    learning_rate: f64,

    /// Order of the tokens, and random numbers
    #[arg(long, default_value_t = TrainOptions::default().seed)]
    seed: u64,

    /// Start at random numbers instead of the closed form
    #[arg(long)]
    from_scratch: bool,

    /// Tokens of the text to use at most
    #[arg(long, value_name = "COUNT", default_value_t = TrainOptions::default().fit.tokens, value_parser = positive)]
    tokens: usize,

    /// Budget of the model while it runs [default: what is free]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,

    /// File to write [default: predictors.safetensors in the model's folder]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &TrainArgs, interrupt: Interrupt) -> Result<ExitCode> {
    refuse_demo(&args.model)?;
    let options = args.options(interrupt)?;
    let report = with_progress(|progress| train(&args.model, &args.text_file, &options, progress))?;
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&summary(&report, args.target_recall))?,
    }
    Ok(ExitCode::SUCCESS)
}

impl TrainArgs {
    fn options(&self, interrupt: Interrupt) -> Result<TrainOptions> {
        Ok(TrainOptions {
            fit: FitOptions {
                rank: self.rank,
                recall: self.target_recall,
                tokens: self.tokens,
                memory: self.memory,
                out: self.out.clone(),
                interrupt,
            },
            last_layers: self.last_layers,
            last_rank: self.last_rank,
            keep_rank: self.keep_rank,
            epochs: self.epochs,
            learning_rate: self.learning_rate,
            seed: self.seed,
            from_scratch: self.from_scratch,
            probabilities: self.threshold.clone(),
            // The processor, but in a program built for CUDA.
            device: Device::cuda_if_available(0)?,
            ..TrainOptions::default()
        })
    }
}

fn probability(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0 && value < 1.0, "between 0 and 1")
}

fn rate(text: &str) -> Result<f64, String> {
    number(
        text,
        |value| value > 0.0 && value <= 1.0,
        "more than 0 and at most 1",
    )
}

/// Closed form and trained pair side by side, a line for each layer; then what else was tried.
fn summary(report: &TrainReport, recall: f64) -> String {
    let mut lines = vec![
        "                        closed form           trained".to_owned(),
        "layer  rank  epochs   recall   selected   recall   selected     active".to_owned(),
    ];
    let line = |start: String, closed: &LayerQuality, trained: &LayerQuality| {
        format!(
            "{start}   {:>6.3}   {:>6.1} %   {:>6.3}   {:>6.1} %   {:>6.1} %",
            closed.recall,
            100.0 * closed.selected_fraction,
            trained.recall,
            100.0 * trained.selected_fraction,
            100.0 * trained.active_fraction
        )
    };
    for (index, layer) in report.layers.iter().enumerate() {
        let start = format!("{index:>5}  {:>4}  {:>6}", layer.rank, layer.epochs);
        lines.push(line(start, &layer.closed_form, &layer.trained[0]));
    }
    let of = |quality: &dyn Fn(&TrainedLayer) -> LayerQuality| -> LayerQuality {
        mean(&report.layers.iter().map(quality).collect::<Vec<_>>())
    };
    let closed = of(&|layer| layer.closed_form);
    let thresholds = report.layers.first().map_or(0, |layer| layer.trained.len());
    for at in 0..thresholds {
        let trained = of(&|layer| layer.trained[at]);
        let label = match thresholds {
            1 => " mean              ".to_owned(),
            _ => format!(" mean, threshold {:<2}", at + 1),
        };
        lines.push(line(label, &closed, &trained));
    }
    let [learnt, tuned, measured] = report.tokens;
    lines.push(format!(
        "learnt from {learnt} tokens, judged at a recall of {recall} on {tuned} others, measured on {measured} others"
    ));
    lines.push(file_line(&report.path, report.bytes));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_has_a_line_for_each_layer_and_each_threshold() {
        let quality = |recall| LayerQuality {
            recall,
            ..LayerQuality::default()
        };
        let layer = |trained: &[f32]| TrainedLayer {
            rank: 64,
            epochs: 3,
            closed_form: quality(0.8),
            trained: trained.iter().map(|recall| quality(*recall)).collect(),
        };
        let mut report = TrainReport {
            path: "m/predictors.safetensors".into(),
            bytes: 2048,
            tokens: [80, 10, 10],
            layers: vec![layer(&[0.9]), layer(&[1.0])],
        };
        let text = summary(&report, 0.95);
        assert_eq!(text.lines().count(), 7);
        let means = text.lines().nth(4).unwrap();
        assert!(means.contains("0.800") && means.contains("0.950"), "{text}");
        let columns: Vec<usize> = text.lines().skip(1).take(4).map(str::len).collect();
        assert_eq!(columns, [columns[0]; 4], "{text}");
        report.layers = vec![layer(&[0.9, 0.7])];
        let text = summary(&report, 0.95);
        assert!(
            text.contains("threshold 2") && text.contains("0.700"),
            "{text}"
        );
    }
}
