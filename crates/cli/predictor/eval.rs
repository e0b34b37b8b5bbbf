//! `wick predictor eval`: what a model's selector finds and misses on a text.
//!
//! Pictures have what figures 9 and 3b of "LLM in a flash" show.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{ensure, Context, Result};
use candle_wick::HumanBytes;
use candle_wick_convert::predictor::{evaluate, Bin, Evaluation, LayerEvaluation, Quality};
use candle_wick_models::{Interrupt, LoadedModel};
use clap::Args;

use super::{with_progress, TextArgs};
use crate::args::{positive, ModelArgs};
use crate::bench::plot::{Axis, Figure, Line, Mark, Panel, Scale};
use crate::output;

/// The paper's window.
const WINDOW_TOKENS: usize = 5;

#[derive(Args, Debug)]
pub(super) struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    text: TextArgs,

    /// Tokens of the text to use at most, from its start
    #[arg(long, value_name = "COUNT", default_value_t = 4096, value_parser = positive)]
    tokens: usize,

    /// Folder for pictures of the figures, as SVG and PNG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &EvalArgs, interrupt: Interrupt) -> Result<ExitCode> {
    let mut opened = args.model.open(interrupt)?;
    let tokenizer = opened.tokenizer.take();
    let path = opened.folder.path();
    let mut ids = args.text.ids(|| {
        let folder = path.display();
        tokenizer.with_context(|| format!("{folder} has no tokenizer.json: give --ids"))
    })?;
    ids.truncate(args.tokens);
    ensure!(
        !ids.is_empty(),
        "the text has 0 tokens, nothing to judge by"
    );
    if let Some(folder) = &args.plot {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let name = path.display().to_string();
    let window = args.model.given().window_tokens.unwrap_or(WINDOW_TOKENS);
    let model = LoadedModel::load(opened.folder, &opened.options)?;
    let evaluation = with_progress(|progress| evaluate(model, &ids, window, progress))?;
    match args.json {
        true => output::print_json(&evaluation)?,
        false => output::print(&table(&evaluation))?,
    }
    if let Some(folder) = &args.plot {
        draw(&evaluation, &name, folder)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A line for each layer, one for all, and what it says beside.
fn table(evaluation: &Evaluation) -> String {
    let head = "layer   active  selected   recall  false +  mass missed   read/token   every cached: share  recall  mass missed";
    let mut lines = vec![head.to_owned()];
    let line = |label: &str, quality: &Quality, bytes: f64| {
        format!(
            "{label:>5}  {:>5.2} %   {:>5.2} %  {:>6.2} %  {:>5.2} %  {:>9.3} %  {:>11}   {:>17.2} %  {:>5.2} %  {:>9.3} %",
            100.0 * quality.active,
            100.0 * quality.selected,
            100.0 * quality.recall,
            100.0 * quality.false_positives,
            100.0 * quality.mass_missed,
            HumanBytes(bytes.round() as u64).to_string(),
            100.0 * quality.cached,
            100.0 * quality.cached_recall,
            100.0 * quality.cached_mass_missed,
        )
    };
    for (index, layer) in evaluation.layers.iter().enumerate() {
        lines.push(line(
            &index.to_string(),
            &layer.quality,
            layer.bytes_per_token,
        ));
    }
    lines.push(line("all", &evaluation.all, evaluation.bytes_per_token));
    if let [Some(active), Some(missed)] = medians(&evaluation.histogram) {
        lines.push(format!(
            "half of the active neurons have a pre-activation below {active:.3}, half of the missed ones one below {missed:.3}"
        ));
    }
    lines.push(format!(
        "{}, {} tokens; cached: selected by the last {} tokens, what the paper multiplies as well",
        evaluation.selector, evaluation.tokens, evaluation.window
    ));
    lines.join("\n") + "\n"
}

/// The ends of the bins with the median of all active neurons, and with that of the missed ones.
fn medians(bins: &[Bin]) -> [Option<f32>; 2] {
    let median = |count: fn(&Bin) -> u64| {
        let total: u64 = bins.iter().map(count).sum();
        let mut sum = 0;
        let bin = bins.iter().find(|bin| {
            sum += count(bin);
            total > 0 && 2 * sum >= total
        });
        bin.map(|bin| bin.from * std::f32::consts::SQRT_2)
    };
    [median(|bin| bin.active), median(|bin| bin.missed)]
}

fn draw(evaluation: &Evaluation, name: &str, folder: &Path) -> Result<()> {
    let note = format!(
        "{}, {} tokens; cached: selected by the last {} tokens",
        evaluation.selector, evaluation.tokens, evaluation.window
    );
    by_layer(evaluation, name, &note).write(folder, "layers")?;
    histogram(evaluation, name, &note).write(folder, "pre-activations")
}

/// Figure 9: what is active and what is selected, by layer; below, what of it is missed.
fn by_layer(evaluation: &Evaluation, name: &str, note: &str) -> Figure {
    let percent = |of: fn(&Quality) -> f64| -> Vec<Mark> {
        let layers = evaluation.layers.iter().enumerate();
        let mark = |(index, layer): (usize, &LayerEvaluation)| {
            mark(index as f64, 100.0 * of(&layer.quality))
        };
        layers.map(mark).collect()
    };
    // A name has one colour in all panels, the legend those of the first.
    let panel = |label: &str, active, selected, cached| Panel {
        y: Axis::new(label, Scale::Linear),
        lines: [
            ("active", active),
            ("selected", selected),
            ("cached", cached),
        ]
        .map(|(name, marks)| Line {
            name: name.to_owned(),
            marks,
        })
        .into(),
    };
    Figure {
        title: format!("{name}: neurons by layer"),
        note: note.to_owned(),
        x: Axis::new("layer", Scale::Linear),
        panels: vec![
            panel(
                "% of the neurons",
                percent(|quality| quality.active),
                percent(|quality| quality.selected),
                percent(|quality| quality.cached),
            ),
            panel(
                "missed, % of the active",
                Vec::new(),
                percent(|quality| 1.0 - quality.recall),
                percent(|quality| 1.0 - quality.cached_recall),
            ),
            panel(
                "missed, % of their sum",
                Vec::new(),
                percent(|quality| quality.mass_missed),
                percent(|quality| quality.cached_mass_missed),
            ),
        ],
    }
}

/// Figure 3b: how near to zero the pre-activations of missed neurons are.
fn histogram(evaluation: &Evaluation, name: &str, note: &str) -> Figure {
    let bins = &evaluation.histogram;
    let active: u64 = bins.iter().map(|bin| bin.active).sum();
    let line = |name: &str, count: fn(&Bin) -> u64| Line {
        name: name.to_owned(),
        marks: {
            let middle = |bin: &Bin| f64::from(bin.from) * 2f64.powf(0.25);
            let share = |bin: &Bin| 100.0 * count(bin) as f64 / active.max(1) as f64;
            let marks = bins.iter().map(|bin| mark(middle(bin), share(bin)));
            marks.collect()
        },
    };
    Figure {
        title: format!("{name}: pre-activations of active neurons"),
        note: note.to_owned(),
        x: Axis::new(
            "pre-activation above the activation's threshold",
            Scale::Log2,
        ),
        panels: vec![Panel {
            y: Axis::new("% of the active, by half octaves", Scale::Linear),
            lines: vec![
                line("all active", |bin| bin.active),
                line("missed", |bin| bin.missed),
            ],
        }],
    }
}

fn mark(x: f64, y: f64) -> Mark {
    Mark { x, y, range: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bins(counts: &[(u64, u64)]) -> Vec<Bin> {
        let bin = |(index, (active, missed)): (usize, &(u64, u64))| Bin {
            from: (index as f32).exp2(),
            active: *active,
            missed: *missed,
        };
        counts.iter().enumerate().map(bin).collect()
    }

    #[test]
    fn medians_are_where_half_lies_below() {
        let root = std::f32::consts::SQRT_2;
        let medians = medians(&bins(&[(1, 1), (2, 0), (3, 0)]));
        assert_eq!(medians, [Some(2.0 * root), Some(root)]);
        assert_eq!(super::medians(&bins(&[(4, 0)]))[1], None);
        assert_eq!(super::medians(&[]), [None, None]);
    }
}
