//! `wick window`: what a recorded trace needs, by the length of a window and by who leaves the cache.
//!
//! All figures are means over tokens and neurons of all layers; `--json` has each layer's own, too.

mod misses;
mod usage;

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{ensure, Result};
use candle_wick::{CachePolicy, LayerTrace, RecordedTrace};
use clap::Args;
use rayon::prelude::*;
use serde::Serialize;

use crate::args::{positive, share};
use crate::output;
use misses::{fewest_misses, misses};
use usage::Usage;

/// Windows that the table shows; `--json` has all.
const WINDOWS_SHOWN: [usize; 12] = [1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 26, 32];

#[derive(Args, Debug)]
pub(crate) struct WindowArgs {
    /// File that `wick trace` wrote
    trace: PathBuf,

    /// Slots of a layer's cache, as shares of its neurons
    #[arg(
        long,
        alias = "share",
        value_name = "SHARES",
        value_delimiter = ',',
        default_value = "15%,20%,25%,30%,40%,50%,75%",
        value_parser = share,
        conflicts_with = "slots"
    )]
    resident: Vec<f64>,

    /// Slots of a layer's cache, as counts
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', value_parser = positive)]
    slots: Vec<usize>,

    /// Windows of the paper's eager form, which drops a neuron as soon as none of the last COUNT tokens used it
    #[arg(
        long,
        value_name = "COUNTS",
        value_delimiter = ',',
        default_values_t = [5],
        value_parser = positive
    )]
    window: Vec<usize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// How many slots a layer has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Residency {
    Share(f64),
    Slots(usize),
}

impl Residency {
    /// As a loaded model would have them.
    fn slots(self, width: usize) -> usize {
        let slots = match self {
            Self::Share(share) => (share * width as f64).round() as usize,
            Self::Slots(slots) => slots,
        };
        slots.max(2).min(width)
    }
}

/// Who leaves the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Policy(CachePolicy),
    /// `Lru`, and what the last tokens did not use is dropped at once.
    Eager(usize),
    /// The bound.
    Belady,
}

impl Rule {
    fn misses(self, layer: &LayerTrace, slots: usize) -> u64 {
        match self {
            Self::Policy(policy) => misses(layer, slots, policy, None),
            Self::Eager(window) => misses(layer, slots, CachePolicy::Lru, Some(window)),
            Self::Belady => fewest_misses(layer, slots),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(policy) => write!(f, "{policy}"),
            Self::Eager(window) => write!(f, "window {window}"),
            Self::Belady => f.write_str("belady"),
        }
    }
}

/// What is known of the trace, and what it needs.
#[derive(Debug, Serialize)]
struct Report {
    path: String,
    model_type: String,
    model_hash: String,
    selector: String,
    is_replayed: bool,
    tokens: usize,
    sequence_tokens: usize,
    neurons: usize,
    /// Share of the neurons that a token has.
    selected: f64,
    windows: Vec<WindowFigures>,
    residencies: Vec<ResidencyFigures>,
    layers: Vec<LayerFigures>,
}

/// Shares of the neurons.
#[derive(Debug, PartialEq, Serialize)]
struct WindowFigures {
    tokens: usize,
    /// That at least one token of the window has: `s_agg`.
    union: f64,
    /// That a token has and none of the window before it.
    fresh: f64,
}

#[derive(Debug, Serialize)]
struct ResidencyFigures {
    /// Slots, as a share of the neurons.
    resident: f64,
    rules: Vec<RuleFigures>,
}

#[derive(Debug, Serialize)]
struct RuleFigures {
    rule: String,
    /// Share of the neurons that a token has to read.
    missed: f64,
}

#[derive(Debug, Serialize)]
struct LayerFigures {
    neurons: usize,
    selected: f64,
    windows: Vec<WindowFigures>,
}

/// What one layer adds to the sums.
struct LayerSums {
    width: usize,
    entries: usize,
    usage: Usage,
    /// By residency, then by rule.
    misses: Vec<Vec<u64>>,
}

pub(crate) fn run(args: &WindowArgs) -> Result<ExitCode> {
    let trace = RecordedTrace::open(&args.trace)?;
    ensure!(
        trace.tokens() >= 2,
        "{} has {} tokens, a window needs at least 2",
        args.trace.display(),
        trace.tokens()
    );
    let (residencies, rules) = (args.residencies(), args.rules());
    let layers = (0..trace.intermediate_sizes().len()).map(|index| {
        let layer = trace.layer(index)?;
        Ok(LayerSums::of(&layer, &residencies, &rules))
    });
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let report = Report::new(args, &trace, &layers, &rules);
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&report.table())?,
    }
    Ok(ExitCode::SUCCESS)
}

impl WindowArgs {
    fn residencies(&self) -> Vec<Residency> {
        match &self.slots[..] {
            [] => self
                .resident
                .iter()
                .copied()
                .map(Residency::Share)
                .collect(),
            slots => slots.iter().copied().map(Residency::Slots).collect(),
        }
    }

    fn rules(&self) -> Vec<Rule> {
        let policies = CachePolicy::ALL.into_iter().map(Rule::Policy);
        let windows = self.window.iter().copied().map(Rule::Eager);
        policies.chain(windows).chain([Rule::Belady]).collect()
    }
}

impl LayerSums {
    fn of(layer: &LayerTrace, residencies: &[Residency], rules: &[Rule]) -> Self {
        let width = layer.intermediate_size();
        let by_rule = |residency: &Residency| {
            let slots = residency.slots(width);
            let misses = rules.par_iter().map(|rule| rule.misses(layer, slots));
            misses.collect()
        };
        Self {
            width,
            entries: layer.entries(),
            usage: Usage::of(layer),
            misses: residencies.par_iter().map(by_rule).collect(),
        }
    }
}

/// The mean shares of layers with `neurons` neurons in all, from their sums.
fn window_figures<'a>(
    usages: impl Iterator<Item = &'a Usage> + Clone,
    neurons: usize,
    tokens: usize,
) -> Vec<WindowFigures> {
    let longest = usages.clone().next().map_or(0, |usage| usage.union.len());
    let figures = (1..=longest).map(|window| {
        let sum = |of: fn(&Usage) -> &[u64]| -> u64 {
            usages.clone().map(|usage| of(usage)[window - 1]).sum()
        };
        let per = |sum: u64, count: usize| sum as f64 / (count * neurons.max(1)) as f64;
        WindowFigures {
            tokens: window,
            union: per(sum(|usage| &usage.union), Usage::windows(window, tokens)),
            fresh: per(sum(|usage| &usage.fresh), tokens - window),
        }
    });
    figures.collect()
}

impl Report {
    fn new(args: &WindowArgs, trace: &RecordedTrace, layers: &[LayerSums], rules: &[Rule]) -> Self {
        let tokens = trace.tokens();
        let neurons: usize = layers.iter().map(|layer| layer.width).sum();
        let entries: usize = layers.iter().map(|layer| layer.entries).sum();
        let share = |count: u64, neurons: usize| count as f64 / (tokens * neurons.max(1)) as f64;
        let rule = |residency: usize, rule: usize| {
            let misses = layers.iter().map(|layer| layer.misses[residency][rule]);
            RuleFigures {
                rule: rules[rule].to_string(),
                missed: share(misses.sum(), neurons),
            }
        };
        let residency = |(index, residency): (usize, Residency)| {
            let slots = layers.iter().map(|layer| residency.slots(layer.width));
            ResidencyFigures {
                resident: slots.sum::<usize>() as f64 / neurons.max(1) as f64,
                rules: (0..rules.len()).map(|r| rule(index, r)).collect(),
            }
        };
        let layer_figures = |layer: &LayerSums| LayerFigures {
            neurons: layer.width,
            selected: share(layer.entries as u64, layer.width),
            windows: window_figures(std::iter::once(&layer.usage), layer.width, tokens),
        };
        let metadata = trace.metadata().clone();
        Self {
            path: args.trace.display().to_string(),
            model_type: metadata.model_type,
            model_hash: metadata.model_hash,
            selector: metadata.selector,
            is_replayed: metadata.is_replayed,
            tokens,
            sequence_tokens: metadata.sequence_tokens,
            neurons,
            selected: share(entries as u64, neurons),
            windows: window_figures(layers.iter().map(|layer| &layer.usage), neurons, tokens),
            residencies: args
                .residencies()
                .into_iter()
                .enumerate()
                .map(residency)
                .collect(),
            layers: layers.iter().map(layer_figures).collect(),
        }
    }

    fn table(&self) -> String {
        let replayed = if self.is_replayed { ", replayed" } else { "" };
        let mut text = format!(
            "{} {}{replayed}, {} tokens in sequences of {}, {} layers, {} neurons, {:.1} % of them for a token\n\n",
            self.model_type,
            self.selector,
            self.tokens,
            self.sequence_tokens,
            self.layers.len(),
            self.neurons,
            100.0 * self.selected
        );
        text += "window   union     new\n";
        let shown = |figures: &&WindowFigures| WINDOWS_SHOWN.contains(&figures.tokens);
        for WindowFigures {
            tokens,
            union,
            fresh,
        } in self.windows.iter().filter(shown)
        {
            let (union, fresh) = (100.0 * union, 100.0 * fresh);
            text += &format!("{tokens:>6}  {union:>5.1} %  {fresh:>5.2} %\n");
        }
        text += "\nread for a token, share of the neurons\nresident";
        for rule in self
            .residencies
            .first()
            .iter()
            .flat_map(|first| &first.rules)
        {
            text += &format!("  {:>9}", rule.rule);
        }
        for residency in &self.residencies {
            text += &format!("\n{:>6.1} %", 100.0 * residency.resident);
            for rule in &residency.rules {
                text += &format!("  {:>7.2} %", 100.0 * rule.missed);
            }
        }
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use candle_wick::{TraceMetadata, TraceRecorder};
    use clap::Parser;

    use super::*;

    /// A recorded layer in which each token has one of `sets`.
    pub(super) fn layer_trace(width: usize, sets: &[Vec<u32>]) -> LayerTrace {
        let file = tempfile::NamedTempFile::new().unwrap();
        record(file.path().to_owned(), &[width], sets)
            .layer(0)
            .unwrap()
    }

    fn record(path: PathBuf, widths: &[usize], sets: &[Vec<u32>]) -> RecordedTrace {
        let metadata = TraceMetadata {
            model_type: "opt".to_owned(),
            model_hash: String::new(),
            selector: "oracle".to_owned(),
            is_replayed: false,
            sequence_tokens: 512,
        };
        let mut recorder = TraceRecorder::create(&path, metadata, widths.iter().copied()).unwrap();
        for set in sets {
            (0..widths.len()).for_each(|layer| recorder.push(layer, set));
        }
        recorder.finish().unwrap();
        RecordedTrace::open(&path).unwrap()
    }

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        window: WindowArgs,
    }

    fn args(line: &str) -> Result<WindowArgs, clap::Error> {
        let words = ["wick", "a.trace"]
            .into_iter()
            .chain(line.split_whitespace());
        Command::try_parse_from(words).map(|command| command.window)
    }

    #[test]
    fn lists_are_read() {
        let shares = args("--resident 10%,1 --window 2,4").unwrap();
        assert_eq!(
            shares.residencies(),
            [Residency::Share(0.1), Residency::Share(1.0)]
        );
        let rules: Vec<String> = shares.rules().iter().map(Rule::to_string).collect();
        assert_eq!(rules, ["lru", "lfu", "window 2", "window 4", "belady"]);
        let slots = args("--slots 3,400").unwrap().residencies();
        assert_eq!([1000, 100].map(|width| slots[1].slots(width)), [400, 100]);
        assert_eq!(Residency::Share(0.001).slots(64), 2);
        for nonsense in [
            "--resident 0",
            "--resident 110%",
            "--slots 0",
            "--slots 3 --resident 50%",
            "--window 0",
        ] {
            assert!(args(nonsense).is_err(), "{nonsense}");
        }
    }

    #[test]
    fn the_report_adds_layers_up() {
        let folder = tempfile::tempdir().unwrap();
        let sets: Vec<Vec<u32>> = (0..8).map(|token| vec![token % 2, 4 + token % 4]).collect();
        let trace = record(folder.path().join("a.trace"), &[10, 30], &sets);
        let args = args("--share 0.3,1").unwrap();
        let (residencies, rules) = (args.residencies(), args.rules());
        let sums = |layer: usize| LayerSums::of(&trace.layer(layer).unwrap(), &residencies, &rules);
        let report = Report::new(&args, &trace, &[sums(0), sums(1)], &rules);
        assert_eq!((report.neurons, report.selected), (40, 0.1));
        // Each token has two neurons that its neighbours do not have.
        let first = &report.windows[0];
        assert_eq!((first.tokens, first.union, first.fresh), (1, 0.1, 0.1));
        assert_eq!(report.windows[3].union, 2.0 * 6.0 / 40.0);
        assert_eq!(report.windows.len(), 7);
        // With room for all, each of six neurons is read once: they come again within the window.
        let all = &report.residencies[1];
        assert_eq!(all.resident, 1.0);
        for rule in &all.rules {
            assert_eq!(rule.missed, 2.0 * 6.0 / (8.0 * 40.0), "{}", rule.rule);
        }
        let table = report.table();
        for part in [
            "opt oracle, 8 tokens",
            "belady",
            " 100.0 %",
            "1   10.0 %  10.00 %",
        ] {
            assert!(table.contains(part), "{part} in {table}");
        }
    }
}
