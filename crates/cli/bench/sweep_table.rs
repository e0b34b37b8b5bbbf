//! What a sweep found: its points, what they say about each other, and its table.
//!
//! Points are medians over the tokens of all rounds. Judgements are about medians too: a budget that is slower than a
//! smaller one by more than [`SLOWER_MAX`] is a cliff, a budget should be used to [`USED_MIN`] while something of the
//! model is left on flash, and after its first block the second half of a text
//! should not take more than [`SLOWER_MAX`] times what the first takes. Halves, for what a text is about changes what it
//! reads from block to block.
//!
//! Not here: its picture (`sweep_figure`).

use std::fmt;

use serde::Serialize;

use super::row::RowFigures;
use super::sweep::{Axis, TOP_P};
use super::table::{Measured, Row};
use crate::machine::Machine;
use crate::probe::Rates;
use crate::spread::Spread;

/// By how much a larger budget may be slower than a smaller one, and the end of a text than its start.
const SLOWER_MAX: f64 = 1.15;
/// Share of a budget that should be used.
const USED_MIN: f64 = 0.85;

/// A whole sweep.
#[derive(Serialize)]
pub(crate) struct Sweep {
    pub(crate) name: String,
    pub(crate) model: String,
    /// Whose geometry random weights have; `None` for a real model.
    pub(crate) synthetic: Option<String>,
    /// Where the figures of the replayed trace are from.
    pub(crate) activity: Option<&'static str>,
    pub(crate) over: Axis,
    pub(crate) selector: &'static str,
    /// The budget; `None` where it varies.
    pub(crate) memory: Option<String>,
    /// Who left the neuron cache.
    pub(crate) cache_policy: &'static str,
    pub(crate) ctx: usize,
    /// Of each setting in each round.
    pub(crate) tokens: usize,
    /// Before those, not measured.
    pub(crate) warmup_tokens: usize,
    pub(crate) rounds: usize,
    /// Whether points are missing because somebody stopped the sweep.
    pub(crate) is_interrupted: bool,
    pub(crate) machine: Machine,
    pub(crate) rates: Rates,
    /// All weights of the dense model.
    pub(crate) dense_weight_bytes: u64,
    /// Weights in DRAM when nothing is left on flash: with padding and predictors.
    pub(crate) full_weight_bytes: u64,
    pub(crate) points: Vec<Point>,
    pub(crate) checks: Vec<Check>,
}

/// One setting, all its rounds.
pub(crate) struct Measurement {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) rounds: Vec<RowFigures>,
    pub(crate) in_cgroup: bool,
}

/// A place on the axis.
#[derive(Serialize)]
pub(crate) struct Point {
    /// Which line it belongs to.
    pub(super) series: String,
    /// Budget in bytes, window in tokens (twice the widest for none), last token of a block.
    pub(super) value: f64,
    /// Weights in DRAM, as a share of the dense model's.
    pub(super) resident: f64,
    /// Whether nothing is left on flash.
    fits: bool,
    /// Peak over budget.
    used: Option<f64>,
    /// Time over that of the fastest smaller budget; only along budgets.
    over_smaller: Option<f64>,
    #[serde(flatten)]
    pub(super) row: Row,
}

/// A judgement.
#[derive(Serialize)]
pub(crate) struct Check {
    name: &'static str,
    holds: bool,
    text: String,
}

impl Measurement {
    pub(crate) fn push(&mut self, figures: RowFigures, in_cgroup: bool) {
        self.rounds.push(figures);
        self.in_cgroup &= in_cgroup;
    }

    /// The tokens from `start` on, at most `count`, of all rounds.
    fn pooled(&self, name: String, start: usize, count: usize) -> Option<Measured> {
        let mut figures = self.rounds.first()?.clone();
        figures.peak_bytes = self
            .rounds
            .iter()
            .filter_map(|round| round.peak_bytes)
            .max();
        let tokens = self.rounds.iter().map(|round| &round.tokens);
        let tokens = tokens.flat_map(|tokens| tokens.iter().skip(start).take(count));
        figures.tokens = tokens.copied().collect();
        Some(Measured {
            name,
            figures,
            in_cgroup: self.in_cgroup,
        })
    }

    fn tokens(&self) -> usize {
        self.rounds.first().map_or(0, |round| round.tokens.len())
    }
}

impl Sweep {
    /// Makes points of what was measured, one a block where there are blocks, and judges them.
    pub(crate) fn fill(&mut self, measured: &[Measurement], block: Option<usize>) {
        for setting in measured {
            let count = block.unwrap_or(setting.tokens().max(1));
            for start in (0..setting.tokens()).step_by(count) {
                let end = (start + count).min(setting.tokens());
                let (name, series, value) = match block {
                    Some(_) => {
                        let name = format!("{}..{end}", start + 1);
                        (name, setting.name.as_str(), end as f64)
                    }
                    None => (setting.name.clone(), "measured", setting.value),
                };
                if let Some(pooled) = setting.pooled(name, start, count) {
                    let point = self.point(series, value, &pooled);
                    self.points.push(point);
                }
            }
        }
        match self.over {
            Axis::Memory => self.judge_budgets(),
            Axis::Length => self.judge_length(),
            Axis::Window => self.judge_windows(),
        }
    }

    fn point(&self, series: &str, value: f64, measured: &Measured) -> Point {
        let row = Row::new(measured, &self.rates);
        let used = |peak: u64| Some(peak as f64 / row.budget_bytes? as f64);
        Point {
            series: series.to_owned(),
            value,
            resident: row.dram_bytes as f64 / self.dense_weight_bytes.max(1) as f64,
            fits: row.dram_bytes >= self.full_weight_bytes,
            used: row.peak_bytes.and_then(used),
            over_smaller: None,
            row,
        }
    }

    fn judge_budgets(&mut self) {
        let mut fastest = f64::INFINITY;
        for point in &mut self.points {
            if fastest.is_finite() {
                point.over_smaller = Some(point.row.total_ms / fastest);
            }
            fastest = fastest.min(point.row.total_ms);
        }
        let count = |is_bad: fn(&&Point) -> bool| self.points.iter().filter(is_bad).count();
        let (cliffs, unused) = (
            count(|point| point.is_cliff()),
            count(|point| point.is_unused()),
        );
        self.checks = vec![
            Check {
                name: "no cliff",
                holds: cliffs == 0,
                text: format!(
                    "{cliffs} budgets slower than {SLOWER_MAX} times the fastest smaller one"
                ),
            },
            Check {
                name: "budgets are used",
                holds: unused == 0,
                text: format!(
                    "{unused} budgets used to less than {USED_MIN} though the model does not fit"
                ),
            },
        ];
    }

    fn judge_length(&mut self) {
        let mut checks = Vec::new();
        for series in self.series() {
            let points = self.points.iter().filter(|point| point.series == series);
            // The first block fills the slots.
            let points: Vec<&Point> = points.skip(1).collect();
            let half = points.len() / 2;
            if half == 0 {
                continue;
            }
            let (first, last) = points.split_at(half);
            let growth = |of: fn(&Row) -> f64| {
                let median = |points: &[&Point]| {
                    Spread::of(points.iter().map(|point| of(&point.row))).median
                };
                times(median(last), median(first))
            };
            let (bytes, time) = (
                growth(|row| row.bytes_per_token),
                growth(|row| row.total_ms),
            );
            checks.push(Check {
                name: "does not grow",
                holds: bytes <= SLOWER_MAX && time <= SLOWER_MAX,
                text: format!(
                    "{series}: the second half takes {bytes:.2} times the bytes and {time:.2} times the time of the \
                     first after a block to warm up"
                ),
            });
        }
        self.checks = checks;
    }

    fn judge_windows(&mut self) {
        let least = |of: fn(&Row) -> f64| {
            let by = |a: &&Point, b: &&Point| of(&a.row).total_cmp(&of(&b.row));
            self.points
                .iter()
                .min_by(by)
                .map_or("", |point| point.row.name.as_str())
        };
        let (fastest, fewest) = (least(|row| row.total_ms), least(|row| row.bytes_per_token));
        // Lazy dropping is the default: it should be no worse than any window.
        let none = self.points.iter().find(|point| point.row.name == "none");
        let Some(none) = none else { return };
        // Bytes, for they do not depend on the machine's mood.
        let bytes = self.points.iter().map(|point| point.row.bytes_per_token);
        let over_best = times(
            none.row.bytes_per_token,
            bytes.fold(f64::INFINITY, f64::min),
        );
        self.checks = vec![Check {
            name: "no window reads no more than any window",
            holds: over_best <= 1.0,
            text: format!(
                "{over_best:.2} times the bytes of the best; fastest {fastest}, fewest bytes {fewest}"
            ),
        }];
    }

    /// Names of the lines, in order.
    pub(super) fn series(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for point in &self.points {
            if !names.contains(&point.series) {
                names.push(point.series.clone());
            }
        }
        names
    }

    /// What it was measured with, in two lines.
    pub(super) fn note(&self) -> String {
        let kind = match self.synthetic {
            Some(_) => "synthetic weights, replayed trace",
            None => "real weights",
        };
        let memory = self.memory.as_ref();
        let memory = memory.map_or(String::new(), |memory| format!(", budget {memory}"));
        let mut reads: Vec<&str> = Vec::new();
        for point in &self.points {
            let said = point.row.reads.as_deref().unwrap_or("no reads");
            if !reads.contains(&said) {
                reads.push(said);
            }
        }
        format!(
            "{kind}, {}{memory}, cache {}, context {}\n{}; medians of {} tokens x {} after {} (bars: min..max)",
            self.selector,
            self.cache_policy,
            self.ctx,
            reads.join(" and "),
            self.tokens,
            self.rounds,
            self.warmup_tokens
        )
    }

    /// What else a reader has to know.
    fn remarks(&self) -> String {
        let mut remarks = String::new();
        if let Some(source) = self.activity {
            remarks += &format!("the trace has the figures of {source}\n");
        }
        if self.over == Axis::Length {
            remarks += &match self.synthetic {
                Some(_) => {
                    "a replayed trace decides which neurons are used: greedy and nucleus would be the same\n".to_owned()
                }
                None => format!(
                    "greedy takes the likeliest token, nucleus samples at temperature 1 from the top {TOP_P}; text goes on \
                     past its end\n"
                ),
            };
            if self.tokens > self.ctx {
                remarks += "where the context is full, the text goes on in a new one from its last token\n";
            }
        }
        if self.is_interrupted {
            remarks += "interrupted: what was measured until then\n";
        }
        remarks
    }
}

/// `a / b` where nothing is once nothing.
fn times(a: f64, b: f64) -> f64 {
    if a == b {
        1.0
    } else {
        a / b
    }
}

impl Point {
    fn is_cliff(&self) -> bool {
        self.over_smaller.is_some_and(|times| times > SLOWER_MAX)
    }

    fn is_unused(&self) -> bool {
        !self.fits && self.used.is_some_and(|used| used < USED_MIN)
    }

    /// Both judgements of a budget.
    fn verdict(&self) -> String {
        let smaller = match self.over_smaller {
            Some(times) if self.is_cliff() => format!("{times:.2} CLIFF"),
            Some(times) => format!("{times:.2} ok"),
            None => "-".to_owned(),
        };
        let used = match self.used {
            Some(_) if self.fits => "fits",
            Some(_) if self.is_unused() => "UNUSED",
            Some(_) => "ok",
            None => "-",
        };
        format!(" {smaller} | {used} |")
    }
}

impl fmt::Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: over {}; {}",
            self.model,
            self.over.name(),
            self.note().replace('\n', "; ")
        )?;
        writeln!(f, "{}\n{}", self.machine, self.remarks())?;
        let is_memory = self.over == Axis::Memory;
        let (more, rule) = match is_memory {
            true => (" beside the fastest smaller | budget used |", "---|---|"),
            false => ("", ""),
        };
        writeln!(
            f,
            "| {} | resident | budget MB | peak/budget | MB/token | selected | missed | I/O ms | total ms (min..max) | floor ms | \
             reads |{more}\n|---|---|---|---|---|---|---|---|---|---|---|{rule}",
            match self.over {
                Axis::Memory => "budget",
                Axis::Length => "tokens",
                Axis::Window => "window",
            }
        )?;
        for point in &self.points {
            let label = match self.over {
                Axis::Length => format!("{}, {}", point.series, point.row.name),
                _ => point.row.name.clone(),
            };
            write!(f, "| {label} |{point}")?;
            writeln!(
                f,
                "{}",
                if is_memory {
                    point.verdict()
                } else {
                    String::new()
                }
            )?;
        }
        writeln!(f)?;
        for check in &self.checks {
            let holds = if check.holds {
                "holds"
            } else {
                "DOES NOT HOLD"
            };
            writeln!(f, "{}: {holds} ({})", check.name, check.text)?;
        }
        if self.points.iter().any(|point| !point.row.in_cgroup) {
            writeln!(
                f,
                "no memory cgroup could be made: budgets were not enforced"
            )?;
        }
        Ok(())
    }
}

/// The columns between a point's name and its verdict.
impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = &self.row;
        let used = self
            .used
            .map_or("-".to_owned(), |used| format!("{used:.3}"));
        write!(
            f,
            " {:.1} % | {:.1} | {used} | {:.2} | {:.1} % | {:.2} % | {:.2} | {:.2} ({:.2}..{:.2}) | {:.2} | {} |",
            100.0 * self.resident,
            row.budget_bytes.unwrap_or(0) as f64 / 1e6,
            row.bytes_per_token / 1e6,
            100.0 * row.selected,
            100.0 * row.missed,
            row.io_ms,
            row.total_ms,
            row.total_ms_min,
            row.total_ms_max,
            row.floor_ms,
            row.reads.as_deref().unwrap_or("none"),
        )
    }
}
