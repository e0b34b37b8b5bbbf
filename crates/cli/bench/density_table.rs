//! What a bench of densities found: its table, its best point, and its picture.

use std::fmt;
use std::path::Path;

use candle_wick::{FfnStats, SelectorKind};
use candle_wick_models::LoadedModel;
use serde::Serialize;

use super::plot::{Axis, Figure, Line, Mark, Panel, Scale};
use super::simulated::SimulatedMs;
use crate::machine::Machine;
use crate::pass::TokenFigures;
use crate::spread::Spread;

/// A whole run.
#[derive(Serialize)]
pub(crate) struct Frontier {
    pub(crate) name: String,
    pub(crate) model: String,
    /// Whose geometry random weights have; `None` for a real model.
    pub(crate) synthetic: Option<String>,
    pub(crate) text: Option<String>,
    pub(crate) blocks: usize,
    pub(crate) block_tokens: usize,
    /// Decoded and measured for each point.
    pub(crate) tokens: usize,
    pub(crate) warmup_tokens: usize,
    pub(crate) cache_policy: &'static str,
    pub(crate) reads: String,
    pub(crate) machine: Machine,
    /// Perplexity over that of dense, less one, that the best point may have.
    pub(crate) max_ppl_loss: f64,
    pub(crate) is_interrupted: bool,
    pub(crate) points: Vec<Point>,
    /// The fastest that loses no more.
    pub(crate) best: Option<String>,
}

/// One selector with its density at one budget.
#[derive(Serialize)]
pub(crate) struct Point {
    name: String,
    /// Which line it belongs to.
    series: String,
    selector: &'static str,
    memory: String,
    /// Mean negative log-probability.
    nll: Option<f64>,
    perplexity: Option<f64>,
    /// Perplexity over that of dense, less one; `None` without dense.
    loss: Option<f64>,
    /// Planned weights in DRAM.
    dram_bytes: u64,
    /// Multiplications in FFNs, as a share of the dense ones.
    multiply_adds: f64,
    /// `None` for selectors that read the whole layer to choose: what they take says nothing of the method.
    decoded: Option<Decoded>,
}

/// What a token took.
#[derive(Serialize)]
struct Decoded {
    /// On average.
    bytes: f64,
    /// Of what was selected, by weight.
    hit_rate: f64,
    total_ms: Spread,
    tokens_per_s: f64,
    simulated: SimulatedMs,
}

impl Point {
    pub(crate) fn new(
        [name, series, memory]: [String; 3],
        nll: Option<f64>,
        figures: &[TokenFigures],
        ffn: &FfnStats,
        model: &LoadedModel,
    ) -> Self {
        let layers = &model.folder().manifest().layers;
        let dense: u64 = layers.iter().map(|layer| layer.multiply_adds()).sum();
        let tokens = ffn.tokens / layers.len().max(1) as u64;
        let selector = model.plan().selector;
        let has_times = selector.is_dip() || !selector.has_density();
        Self {
            name,
            series,
            selector: selector.name(),
            memory,
            nll,
            perplexity: nll.map(f64::exp),
            loss: None,
            dram_bytes: model.plan().weight_bytes,
            multiply_adds: ffn.multiply_adds as f64 / (dense * tokens).max(1) as f64,
            decoded: has_times.then(|| Decoded::of(figures, ffn)),
        }
    }

    fn is_dense(&self) -> bool {
        self.selector == SelectorKind::Dense.name()
    }

    fn tokens_per_s(&self) -> Option<f64> {
        self.decoded.as_ref().map(|decoded| decoded.tokens_per_s)
    }
}

impl Decoded {
    fn of(figures: &[TokenFigures], ffn: &FfnStats) -> Self {
        let mean = |of: &dyn Fn(&TokenFigures) -> f64| {
            figures.iter().map(of).sum::<f64>() / figures.len().max(1) as f64
        };
        let total_ms = Spread::of(figures.iter().map(|token| token.total_ms));
        Self {
            bytes: mean(&|token| token.bytes_read),
            hit_rate: ffn.hit_rate(),
            total_ms,
            tokens_per_s: 1000.0 / total_ms.median,
            simulated: SimulatedMs {
                max: mean(&|token| SimulatedMs::of(token).max),
                sum: mean(&|token| SimulatedMs::of(token).sum),
            },
        }
    }
}

impl Frontier {
    /// Sets every point beside dense, and names the best.
    pub(crate) fn judge(&mut self) {
        let dense = self.points.iter().find(|point| point.is_dense());
        let dense = dense.and_then(|dense| dense.nll);
        for point in &mut self.points {
            let ratio = dense.zip(point.nll).map(|(dense, nll)| (nll - dense).exp());
            point.loss = ratio.map(|ratio| ratio - 1.0);
        }
        let good = self.points.iter().filter_map(|point| {
            let is_good = point.loss? <= self.max_ppl_loss;
            Some((point.tokens_per_s()?, point)).filter(|_| is_good)
        });
        let best = good.max_by(|(a, _), (b, _)| a.total_cmp(b));
        self.best = best.map(|(_, point)| format!("{}, {}", point.name, point.memory));
    }

    /// What it was measured with, in two lines.
    fn note(&self) -> String {
        let what = match (&self.synthetic, &self.text) {
            (Some(name), _) => format!("random weights with the geometry of {name}: speed only"),
            (None, text) => {
                let file = text.as_deref().and_then(|path| Path::new(path).file_name());
                format!(
                    "perplexity of {} in {} blocks of {}",
                    file.map_or("nothing".into(), |name| name.to_string_lossy()),
                    self.blocks,
                    self.block_tokens
                )
            }
        };
        format!(
            "{what}\n{} tokens decoded one by one after {}, cache {}, {}; one process, budgets as planned",
            self.tokens, self.warmup_tokens, self.cache_policy, self.reads
        )
    }

    /// What there is to draw: speed and bytes against loss, or against what is multiplied where nothing is known of loss.
    pub(crate) fn figure(&self) -> Figure {
        let has_loss = self.points.iter().any(|point| point.loss.is_some());
        let x = match has_loss {
            true => Axis::new("perplexity above dense, %", Scale::Linear),
            false => Axis::new("multiply-adds of the FFN, % of dense", Scale::Linear),
        };
        let lines = |of: fn(&Decoded) -> f64| -> Vec<Line> {
            let mut lines: Vec<Line> = Vec::new();
            let measured = self.points.iter().filter_map(|point| {
                let decoded = point.decoded.as_ref();
                Some((point, decoded?))
            });
            for (point, decoded) in measured {
                let mark = Mark {
                    x: 100.0 * point.loss.unwrap_or(point.multiply_adds),
                    y: of(decoded),
                    range: None,
                };
                match lines.iter_mut().find(|line| line.name == point.series) {
                    Some(line) => line.marks.push(mark),
                    None => lines.push(Line {
                        name: point.series.clone(),
                        marks: vec![mark],
                    }),
                }
            }
            lines
        };
        Figure {
            title: format!("{}: what a density loses and saves", self.name),
            note: self.note(),
            x,
            panels: vec![
                Panel {
                    y: Axis::new("tokens/s", Scale::Linear),
                    lines: lines(|decoded| decoded.tokens_per_s),
                },
                Panel {
                    y: Axis::new("MB read per token", Scale::Linear),
                    lines: lines(|decoded| decoded.bytes / 1e6),
                },
            ],
        }
    }
}

impl fmt::Display for Point {
    /// Its row of the table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_dash = |value: Option<String>| value.unwrap_or("-".to_owned());
        write!(
            f,
            "| {} | {} | {} | {} | {:.1} | {:.1} % |",
            self.name,
            self.memory,
            or_dash(self.perplexity.map(|value| format!("{value:.3}"))),
            or_dash(self.loss.map(|loss| format!("{:+.2} %", 100.0 * loss))),
            self.dram_bytes as f64 / 1e6,
            100.0 * self.multiply_adds,
        )?;
        let Some(decoded) = &self.decoded else {
            return write!(f, " - | - | - | - | - |");
        };
        write!(
            f,
            " {:.2} | {:.1} % | {:.2} | {:.1} | {:.1} / {:.1} |",
            decoded.bytes / 1e6,
            100.0 * decoded.hit_rate,
            decoded.total_ms,
            decoded.tokens_per_s,
            decoded.simulated.max,
            decoded.simulated.sum,
        )
    }
}

impl fmt::Display for Frontier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.model, self.note().replace('\n', "; "))?;
        writeln!(f, "{}\n", self.machine)?;
        writeln!(
            f,
            "| selector | budget | perplexity | loss | MB of weights in DRAM | multiply-adds | MB read/token | hits | median ms (min..max) | tokens/s | \
             SIMULATED ms, max / sum |\n|---|---|---|---|---|---|---|---|---|---|---|"
        )?;
        for point in &self.points {
            writeln!(f, "{point}")?;
        }
        writeln!(
            f,
            "\nsimulated: what was counted, on a device with 60 GB/s of DRAM, 1 GB/s of flash and no time to compute; not measured"
        )?;
        if self.is_interrupted {
            writeln!(f, "interrupted: what was measured until then")?;
        }
        match &self.best {
            Some(best) => writeln!(
                f,
                "the fastest within {:.1} % of dense: {best}",
                100.0 * self.max_ppl_loss
            ),
            None => Ok(()),
        }
    }
}
