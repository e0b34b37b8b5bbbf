//! What a model will do on this machine, before it is loaded: `wick plan --predict`.
//!
//! The first layers, or all of a small model, are loaded as the plan places them ([`front`](crate::front)) and run on tokens at random, which
//! gives the rates: how long loading takes for each byte, what a layer takes for a prompt and for a token, what the
//! head takes. A prediction is the sum over all layers. What is not known exactly is which neurons will be missing; the
//! prediction says where its figures are from.
//!
//! Invariants:
//! - only what misses decide is corrected for how many there will be: reads of records and waiting for them. Streamed matrices are
//!   read in whole for every token, the head once, those of layers once a layer.
//! - a token's figures are those that stay: every slot was filled once, or nothing was missing any more. The first tokens of
//!   a run read more.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use candle_wick::{BudgetPlan, FlashFolder, HumanBytes};
use serde::Serialize;

use crate::activity::Expected;
use crate::args::OpenedModel;
use crate::front::{Front, FrontSpec};
use crate::pass::{ms, Pass};
use crate::spread::Spread;

/// Tokens measured: as many as fit into the time, within bounds.
const TOKENS_MIN: usize = 8;
const TOKENS_MAX: usize = 48;
const TOKENS_TIME: Duration = Duration::from_secs(4);

/// The prediction. Times of a token are milliseconds and add up to `token_ms`.
#[derive(Debug, Serialize)]
pub(crate) struct Prediction {
    /// From the start to a model that is ready for its prompt.
    load_s: f64,
    prompt_tokens: usize,
    /// From the start of the prompt, on a model that was just loaded.
    first_token_ms: f64,
    tokens_per_s: f64,
    token_ms: f64,
    /// Waiting for reads, of records and of streamed matrices.
    io_ms: f64,
    /// Keeping the cache's books.
    memory_ms: f64,
    /// Choosing and multiplying neurons.
    compute_ms: f64,
    /// Attention, norms, head.
    other_ms: f64,
    /// The head's part of that, without waiting for its reads.
    head_ms: f64,
    bytes_read_per_token: f64,
    /// Of the device while reads were in flight; 0 without reads.
    read_bytes_per_s: f64,
    /// Shares of the FFN's neurons.
    selected: f64,
    missed: f64,
    /// Where `selected` and `missed` are from.
    activity: String,
    /// Tokens after the prompt until misses were those that stay; `None` where trying that took too long.
    warm_up_tokens: Option<usize>,
    /// Layers that were tried, and how long that took.
    tried_layers: usize,
    layers: usize,
    tried_s: f64,
}

/// What one front showed, for all layers of the model.
struct Tried {
    load_s: f64,
    first_token_ms: f64,
    passes: Vec<Pass>,
    warm_up_tokens: Option<usize>,
    /// Layers of the model for each of the front.
    times: f64,
    /// Of the whole model, for each token.
    streamed_bytes: u64,
}

pub(crate) fn predict(
    model: &OpenedModel,
    plan: &BudgetPlan,
    prompt_tokens: usize,
) -> Result<Prediction> {
    ensure!(
        prompt_tokens <= plan.ctx,
        "a prompt of {prompt_tokens} tokens is longer than the context of {}: raise --ctx up to what the model has",
        plan.ctx
    );
    let started = Instant::now();
    let folder = &model.folder;
    let expected = Expected::of(folder, plan, model.options.cache_policy)?;
    let spec = FrontSpec::new(folder, plan, &model.options, &expected);
    let load = |is_streamed: bool| {
        try_out(
            &spec.with_streamed(folder, is_streamed),
            folder,
            plan,
            prompt_tokens,
        )
    };
    let share = spec.streamed_share;
    let missed = expected.missed;
    let prediction = match share {
        0.0 => load(false)?.prediction(missed),
        1.0 => load(true)?.prediction(missed),
        // Some layers stream their matrices and others do not.
        _ => load(false)?
            .prediction(missed)
            .mixed(load(true)?.prediction(missed), share),
    };
    Ok(Prediction {
        prompt_tokens,
        activity: expected.source,
        tried_layers: spec.layers,
        layers: spec.layers_of_model,
        tried_s: started.elapsed().as_secs_f64(),
        ..prediction
    })
}

fn try_out(
    spec: &FrontSpec,
    folder: &FlashFolder,
    plan: &BudgetPlan,
    prompt_tokens: usize,
) -> Result<Tried> {
    let mut front = spec.load(folder)?;
    let times = spec.layers_of_model as f64 / spec.layers as f64;
    let front_bytes = spec.weight_bytes(folder).max(1);
    let prompt = front.pass(prompt_tokens)?;
    let warm_up_tokens = front.warm_up(prompt.ffn.misses)?;
    Ok(Tried {
        load_s: front.load.as_secs_f64() * (plan.weight_bytes as f64 / front_bytes as f64).max(1.0),
        first_token_ms: times * ms(prompt.times.layers) + ms(prompt.times.head),
        passes: measured(&mut front)?,
        warm_up_tokens,
        times,
        streamed_bytes: spec.streamed_bytes(folder),
    })
}

fn measured(front: &mut Front) -> Result<Vec<Pass>> {
    let started = Instant::now();
    let mut passes = Vec::new();
    while passes.len() < TOKENS_MIN
        || (passes.len() < TOKENS_MAX && started.elapsed() < TOKENS_TIME)
    {
        passes.push(front.pass(1)?);
    }
    Ok(passes)
}

impl Tried {
    /// With reads of records as tried, or in proportion to a share `missed` that is known better than a trace can tell.
    fn prediction(&self, missed: Option<f64>) -> Prediction {
        let median = |of: &dyn Fn(&Pass) -> f64| Spread::of(self.passes.iter().map(of)).median;
        let mean = |of: &dyn Fn(&Pass) -> f64| {
            self.passes.iter().map(of).sum::<f64>() / self.passes.len().max(1) as f64
        };
        let tried = mean(&|pass| pass.figures.missed);
        let missed = missed.filter(|_| tried > 0.0).unwrap_or(tried);
        let of_tried = if tried > 0.0 { missed / tried } else { 1.0 };
        let tried_io_ms = self.times * median(&|pass| ms(pass.ffn.io));
        let record_io_ms = of_tried * tried_io_ms;
        let head_io_ms = median(&|pass| ms(pass.times.head_io));
        let matrix_io_ms = self.times * median(&|pass| ms(pass.layer_matrix_io)) + head_io_ms;
        let io_ms = record_io_ms + matrix_io_ms;
        let all_of_head_ms = median(&|pass| ms(pass.times.head));
        let layers_ms = self.times * median(&|pass| ms(pass.times.layers));
        let token_ms = (layers_ms - tried_io_ms).max(0.0) + record_io_ms + all_of_head_ms;
        let memory_ms = self.times * median(&|pass| pass.figures.memory_ms);
        let compute_ms = self.times * median(&|pass| pass.figures.select_ms + pass.figures.ffn_ms);
        let read_bytes = mean(&|pass| pass.figures.bytes_read);
        let record_bytes = (read_bytes - mean(&|pass| pass.figures.streamed_bytes)).max(0.0);
        let in_flight_s = mean(&|pass| pass.figures.in_flight_ms) / 1000.0;
        Prediction {
            load_s: self.load_s,
            prompt_tokens: 0,
            first_token_ms: self.first_token_ms,
            tokens_per_s: 1000.0 / token_ms.max(1e-6),
            token_ms,
            io_ms,
            memory_ms,
            compute_ms,
            other_ms: (token_ms - io_ms - memory_ms - compute_ms).max(0.0),
            head_ms: (all_of_head_ms - head_io_ms).max(0.0),
            bytes_read_per_token: of_tried * self.times * record_bytes + self.streamed_bytes as f64,
            read_bytes_per_s: read_bytes / in_flight_s.max(1e-9),
            selected: mean(&|pass| pass.figures.selected),
            missed,
            activity: String::new(),
            warm_up_tokens: self.warm_up_tokens,
            tried_layers: 0,
            layers: 0,
            tried_s: 0.0,
        }
    }
}

impl Prediction {
    /// What `share` of `other` and the rest of this one come to.
    fn mixed(self, other: Self, share: f64) -> Self {
        let mix = |of: fn(&Self) -> f64| (1.0 - share) * of(&self) + share * of(&other);
        let token_ms = mix(|one| one.token_ms);
        Self {
            load_s: mix(|one| one.load_s),
            first_token_ms: mix(|one| one.first_token_ms),
            tokens_per_s: 1000.0 / token_ms.max(1e-6),
            token_ms,
            io_ms: mix(|one| one.io_ms),
            memory_ms: mix(|one| one.memory_ms),
            compute_ms: mix(|one| one.compute_ms),
            other_ms: mix(|one| one.other_ms),
            head_ms: mix(|one| one.head_ms),
            bytes_read_per_token: mix(|one| one.bytes_read_per_token),
            read_bytes_per_s: mix(|one| one.read_bytes_per_s),
            ..self
        }
    }
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, label: &str, value: String| {
            writeln!(f, "{label:<20}{value}")
        };
        line(f, "predicted load", format!("{:.2} s", self.load_s))?;
        let first = format!(
            "{:.1} ms after loading, for a prompt of {} tokens",
            self.first_token_ms, self.prompt_tokens
        );
        line(f, "first token", first)?;
        let warm_up = match self.warm_up_tokens {
            Some(tokens) => {
                format!("from {tokens} tokens after the prompt on, when misses are those that stay")
            }
            None => "before the slots were full: later tokens read less".to_owned(),
        };
        line(
            f,
            "decode",
            format!("{:.1} tokens/s, {warm_up}", self.tokens_per_s),
        )?;
        let parts = format!(
            "{:.2} = I/O {:.2} + memory {:.2} + compute {:.2} + other {:.2} (head {:.2})",
            self.token_ms, self.io_ms, self.memory_ms, self.compute_ms, self.other_ms, self.head_ms
        );
        line(f, "ms/token", parts)?;
        let reads = format!(
            "{} per token at {}/s, {:.2} % of the FFN; {:.1} % selected",
            HumanBytes(self.bytes_read_per_token as u64),
            HumanBytes(self.read_bytes_per_s as u64),
            100.0 * self.missed,
            100.0 * self.selected
        );
        line(f, "reads", reads)?;
        line(f, "activity", self.activity.clone())?;
        write!(
            f,
            "{:<20}the first {} of {} layers, for {:.1} s",
            "tried on", self.tried_layers, self.layers, self.tried_s
        )
    }
}

#[cfg(test)]
mod tests {
    use candle_wick::FfnStats;
    use candle_wick_models::ForwardTimes;

    use super::*;
    use crate::pass::TokenFigures;

    #[test]
    fn misses_scale_records_alone_and_the_head_counts_once() {
        let millis = Duration::from_millis;
        let pass = Pass {
            figures: TokenFigures {
                bytes_read: 1100.0,
                streamed_bytes: 1000.0,
                in_flight_ms: 11.0,
                missed: 0.02,
                ..TokenFigures::default()
            },
            times: ForwardTimes {
                layers: millis(10),
                head: millis(30),
                head_io: millis(20),
            },
            ffn: FfnStats {
                io: millis(4),
                ..FfnStats::default()
            },
            layer_matrix_io: millis(3),
        };
        let tried = Tried {
            load_s: 1.0,
            first_token_ms: 1.0,
            passes: vec![pass; 3],
            warm_up_tokens: None,
            times: 8.0,
            streamed_bytes: 5000,
        };
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
        let (all, half) = (tried.prediction(None), tried.prediction(Some(0.01)));
        assert!(near(all.bytes_read_per_token, 8.0 * 100.0 + 5000.0));
        assert!(near(half.bytes_read_per_token, 4.0 * 100.0 + 5000.0));
        assert!(near(all.io_ms, 8.0 * (4.0 + 3.0) + 20.0));
        assert!(near(half.io_ms, 8.0 * (2.0 + 3.0) + 20.0));
        assert!(near(all.token_ms, 8.0 * 10.0 + 30.0));
        assert!(near(half.token_ms, 8.0 * 8.0 + 30.0));
        assert!(near(half.head_ms, 10.0) && near(half.other_ms, 8.0 * 3.0 + 10.0));
        assert!(near(all.read_bytes_per_s, 1e5) && near(half.missed, 0.01));
    }
}
