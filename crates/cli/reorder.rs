//! `wick reorder`: a model again, its neurons in an order made from a trace.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{ensure, Result};
use candle_wick::{peak_rss_bytes, HumanBytes};
use candle_wick_convert::reorder::{
    reorder, Arrangement, LayerOrder, OrderCost, ReorderOptions, ReorderReport,
};
use candle_wick_convert::ConvertProgress;
use clap::Args;
use serde::Serialize;

use crate::args::{share, FolderArgs};
use crate::output;

#[derive(Args, Debug)]
pub(crate) struct ReorderArgs {
    #[command(flatten)]
    folder: FolderArgs,

    /// What `wick trace` recorded of it
    trace: PathBuf,

    /// Folder to write; one that is unfinished is taken up where it stopped
    out: PathBuf,

    /// Share of each layer's neurons that will be in memory: the order is for reading the others
    #[arg(long, value_name = "SHARE", default_value = "25%", value_parser = share)]
    resident: f64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    /// Print errors only
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
}

/// What was written, and what that took.
#[derive(Serialize)]
struct Report<'a> {
    path: String,
    resident: f64,
    #[serde(flatten)]
    found: &'a ReorderReport,
    seconds: f64,
    peak_bytes: Option<u64>,
}

pub(crate) fn run(args: &ReorderArgs) -> Result<ExitCode> {
    let started = Instant::now();
    // It reads everything once, in order, and says nothing about settings.
    let folder = args.folder.open_untuned()?;
    let bar = output::progress_bar(output::BYTES_BAR, args.quiet);
    let on_progress = |progress: ConvertProgress<'_>| output::show_progress(&bar, progress);
    let options = ReorderOptions {
        resident: args.resident,
    };
    let written = reorder(&folder, &args.trace, &args.out, &options, &on_progress);
    bar.finish_and_clear();
    let found = written?;
    ensure!(!found.layers.is_empty(), "the model has no layers");
    let report = Report {
        path: args.out.display().to_string(),
        resident: args.resident,
        found: &found,
        seconds: started.elapsed().as_secs_f64(),
        peak_bytes: peak_rss_bytes(),
    };
    if args.json {
        output::print_json(&report)?;
    } else if !args.quiet {
        output::print(&report.summary())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What `arrangement` costs a layer.
fn cost(layer: &LayerOrder, arrangement: Arrangement) -> OrderCost {
    let mut costs = layer.costs.iter();
    let found = costs.find(|(tried, _)| *tried == arrangement);
    found.map_or(OrderCost::default(), |(_, cost)| *cost)
}

fn figures(cost: OrderCost) -> String {
    format!("{:>10.1}  {:>8.1} KiB", cost.requests, cost.bytes / 1024.0)
}

impl Report<'_> {
    fn summary(&self) -> String {
        let layers = &self.found.layers;
        let mut lines = vec![
            "layer  misses  taken         requests and bytes a token, natural order          taken"
                .to_owned(),
        ];
        for (index, layer) in layers.iter().enumerate() {
            let name = format!("{:?}", layer.arrangement).to_lowercase();
            lines.push(format!(
                "{index:>5}  {:>6.1}  {name:<10}  {:>29}  {}",
                layer.misses,
                figures(cost(layer, Arrangement::Natural)),
                figures(cost(layer, layer.arrangement))
            ));
        }
        let sum = |of: &dyn Fn(&LayerOrder) -> OrderCost| {
            layers
                .iter()
                .map(of)
                .fold(OrderCost::default(), |a, b| OrderCost {
                    requests: a.requests + b.requests,
                    bytes: a.bytes + b.bytes,
                })
        };
        for arrangement in Arrangement::ALL {
            let name = format!("{arrangement:?}").to_lowercase();
            let all = figures(sum(&|layer| cost(layer, arrangement)));
            lines.push(format!("all layers {name}: {all}"));
        }
        let taken = figures(sum(&|layer| cost(layer, layer.arrangement)));
        lines.push(format!("all layers as taken: {taken}"));
        let peak = self.peak_bytes.map_or(String::new(), |bytes| {
            format!(", peak memory {}", HumanBytes(bytes))
        });
        lines.push(format!(
            "{}: {} written in {:.1} s{peak}; figures are of the last fifth of {} tokens, with {:.0} % resident",
            self.path,
            HumanBytes(self.found.bytes),
            self.seconds,
            self.found.tokens,
            100.0 * self.resident
        ));
        lines.join("\n") + "\n"
    }
}
