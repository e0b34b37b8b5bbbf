//! What a run took: the same figures as a table and as a JSON object.
//!
//! Times are per token in milliseconds. Figures per token are those of decoding, or of the prompt where no token
//! was decoded. I/O, memory management and compute are the FFNs'; the rest (attention, head, sampling, and what
//! these read from flash) is `other`.
//!
//! Invariant: every number is finite.

use std::fmt;
use std::time::{Duration, Instant};

use candle_wick::{peak_rss_bytes, Engine, FfnStats, HumanBytes, IoMode, PredictorMetadata};
use candle_wick_models::{LoadedModel, Stop, TextGenerator};
use serde::Serialize;

use crate::pass::ms;
use crate::run::Outcome;

/// Counts what happens from its start to its stop.
pub(crate) struct Meter {
    started: Instant,
    seen_count: usize,
    bytes_read: u64,
}

/// What happened in one phase of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Phase {
    /// Tokens that the model has seen.
    tokens: usize,
    wall: Duration,
    /// From the device, with what was read beyond the records.
    bytes_read: u64,
    ffn: FfnStats,
}

impl Meter {
    /// Starts to count; the model's own counters start anew.
    pub(crate) fn start(generator: &TextGenerator<'_>) -> Self {
        let model = generator.model();
        model.reset_stats();
        Self {
            started: Instant::now(),
            seen_count: generator.seen_count(),
            bytes_read: model.folder().io_counters().bytes,
        }
    }

    pub(crate) fn stop(self, generator: &TextGenerator<'_>) -> Phase {
        let model = generator.model();
        Phase {
            tokens: generator.seen_count() - self.seen_count,
            wall: self.started.elapsed(),
            bytes_read: model.folder().io_counters().bytes - self.bytes_read,
            ffn: model.stats(),
        }
    }
}

impl Phase {
    fn tokens_per_s(&self) -> f64 {
        rate(self.tokens, self.wall)
    }

    fn per_token(&self, of_phase: f64) -> f64 {
        of_phase / self.tokens.max(1) as f64
    }

    fn ms_per_token(&self, time: Duration) -> f64 {
        self.per_token(ms(time))
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

/// The figures of a run.
#[derive(Serialize)]
pub(crate) struct Report {
    model: String,
    text: Option<String>,
    ids: Vec<u32>,
    pub(crate) stop: Stop,
    selector: &'static str,
    /// Share of the FFN's neurons that a token selected.
    selected_fraction: f64,
    /// Share of the active neurons that the predictors selected when they were fitted.
    predictor_recall: Option<f32>,
    budget_bytes: u64,
    peak_bytes: Option<u64>,
    io_mode: &'static str,
    bytes_read_per_token: f64,
    /// Share of the selected neurons that were in memory.
    hit_rate: f64,
    prompt_tokens: usize,
    prompt_tokens_per_s: f64,
    first_token_ms: Option<f64>,
    tokens_per_s: f64,
    io_ms: f64,
    memory_ms: f64,
    compute_ms: f64,
    other_ms: f64,
    /// Settings of `wick tune` that were used.
    tuned: Option<String>,
    #[serde(skip)]
    table: TableOnly,
}

/// What only the table says.
struct TableOnly {
    io_mode: IoMode,
    io_engine: Engine,
    /// Neurons read ahead, and the share of them that was used.
    ahead: (u64, f64),
    shape: String,
    weight_share: f64,
    streamed_count: usize,
    decoded_tokens: usize,
}

impl Report {
    pub(crate) fn new(model: &LoadedModel, outcome: Outcome, tuned: Option<String>) -> Self {
        let (plan, folder) = (model.plan(), model.folder());
        let (prompt, decode) = (outcome.prompt, outcome.decode);
        let phase = if decode.tokens > 0 { decode } else { prompt };
        let ffn = phase.ffn;
        let compute = ffn.select + ffn.compute;
        let booked = ffn.io + ffn.memory + compute;
        let predictors = match plan.selector.form() {
            Some(_) => folder.predictors().ok().flatten(),
            None => None,
        };
        Self {
            model: folder.path().display().to_string(),
            selector: plan.selector.name(),
            selected_fraction: ffn.selected_fraction(),
            predictor_recall: predictors.map(|found| PredictorMetadata::mean(&found.recall)),
            budget_bytes: plan.budget_bytes,
            peak_bytes: peak_rss_bytes(),
            io_mode: match folder.io_mode() {
                IoMode::Direct { .. } => "direct",
                IoMode::Buffered => "buffered",
            },
            bytes_read_per_token: phase.per_token(phase.bytes_read as f64),
            hit_rate: ffn.hit_rate(),
            prompt_tokens: prompt.tokens,
            prompt_tokens_per_s: prompt.tokens_per_s(),
            first_token_ms: outcome.first_token.map(ms),
            tokens_per_s: if decode.tokens > 0 {
                decode.tokens_per_s()
            } else {
                rate(outcome.ids.len(), prompt.wall + decode.wall)
            },
            io_ms: phase.ms_per_token(ffn.io),
            memory_ms: phase.ms_per_token(ffn.memory),
            compute_ms: phase.ms_per_token(compute),
            other_ms: phase.ms_per_token(phase.wall.saturating_sub(booked)),
            tuned,
            text: outcome.text,
            ids: outcome.ids,
            stop: outcome.stop,
            table: TableOnly {
                io_mode: folder.io_mode(),
                io_engine: folder.io_engine(),
                ahead: (ffn.ahead_read, ffn.ahead_used_share()),
                shape: shape(model),
                weight_share: plan.weight_bytes as f64 / plan.dense_weight_bytes.max(1) as f64,
                streamed_count: plan.streamed.len(),
                decoded_tokens: decode.tokens,
            },
        }
    }

    fn ending(&self) -> &'static str {
        match self.stop {
            Stop::Eos => "the model ended the text",
            Stop::Length => "as many as asked for",
            Stop::Context => "the context is full",
            Stop::Interrupted => "interrupted",
        }
    }

    /// Label and value of each line.
    fn lines(&self) -> Vec<(&'static str, String)> {
        let table = &self.table;
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let peak = self
            .peak_bytes
            .map_or("unknown".to_owned(), |bytes| HumanBytes(bytes).to_string());
        let recall = self
            .predictor_recall
            .map_or(String::new(), |recall| format!(", recall {recall:.3}"));
        let streamed = match table.streamed_count {
            0 => String::new(),
            count => format!(", {} streamed", counted(count, "matrix", "matrices")),
        };
        let first = self.first_token_ms.map_or(String::new(), |ms| {
            format!(", first token after {ms:.1} ms")
        });
        let decode = match table.decoded_tokens {
            0 => String::new(),
            _ => format!(", {:.1} tokens/s", self.tokens_per_s),
        };
        let ahead = match table.ahead {
            (0, _) => String::new(),
            (count, used) => format!(", {count} neurons ahead ({} used)", percent(used)),
        };
        let parts = [self.io_ms, self.memory_ms, self.compute_ms, self.other_ms];
        let [io, memory, compute, other] = parts;
        vec![
            ("model", format!("{} ({})", self.model, table.shape)),
            (
                "memory",
                format!(
                    "peak {peak} of {}, {} of the weights{streamed}",
                    HumanBytes(self.budget_bytes),
                    percent(table.weight_share)
                ),
            ),
            (
                "selector",
                format!("{}, {} of the FFN{recall}", self.selector, percent(self.selected_fraction)),
            ),
            (
                "reads",
                format!(
                    "{} per token, hit rate {}, {}, {}{ahead}",
                    HumanBytes(self.bytes_read_per_token as u64),
                    percent(self.hit_rate),
                    table.io_mode,
                    table.io_engine
                ),
            ),
            (
                "prompt",
                format!("{} tokens, {:.1} tokens/s{first}", self.prompt_tokens, self.prompt_tokens_per_s),
            ),
            ("text", format!("{} tokens{decode}, {}", self.ids.len(), self.ending())),
            (
                "ms/token",
                format!(
                    "{:.3} = I/O {io:.3} + memory {memory:.3} + compute {compute:.3} + other {other:.3}",
                    parts.iter().sum::<f64>()
                ),
            ),
        ]
    }
}

fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Family, layers and width.
fn shape(model: &LoadedModel) -> String {
    let manifest = model.folder().manifest();
    let widest = manifest
        .layers
        .iter()
        .map(|layer| layer.intermediate_size)
        .max();
    format!(
        "{}, {} layers of {} neurons, {}",
        manifest.model_type,
        manifest.layers.len(),
        widest.unwrap_or(0),
        manifest.dtype.name()
    )
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self
            .lines()
            .iter()
            .map(|(label, value)| format!("{label:<10}{value}"))
            .collect();
        f.write_str(&lines.join("\n"))?;
        match &self.tuned {
            Some(tuned) => write!(f, "\n{:<10}{tuned}", "tuned"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_divided_by_nothing_is_finite() {
        let nothing = Phase::default();
        assert_eq!(nothing.tokens_per_s(), 0.0);
        assert_eq!(nothing.ms_per_token(Duration::from_secs(1)), 1000.0);
        assert!(rate(5, Duration::ZERO).is_finite());
    }
}
