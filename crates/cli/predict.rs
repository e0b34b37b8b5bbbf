//! What a model will do on this machine, before it is loaded: `wick plan --predict`.
//!
//! The first layers are loaded as the plan places them ([`front`](crate::front)) and run on tokens at random, which
//! gives the rates: how long loading takes for each byte, what a layer takes for a prompt and for a token, what the
//! head takes. A prediction is the sum over all layers. What is not known exactly is which neurons will be missing; the
//! prediction says where its figures are from.
//!
//! A token's figures are those that stay: every slot was filled once. The first tokens of a run read more.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use candle_wick::{BudgetPlan, FlashFolder, HumanBytes};
use serde::Serialize;

use crate::activity::Expected;
use crate::args::OpenedModel;
use crate::bench::spread::Spread;
use crate::front::{Front, FrontPass, FrontSpec};

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
    /// Waiting for reads.
    io_ms: f64,
    /// Keeping the cache's books.
    memory_ms: f64,
    /// Choosing and multiplying neurons.
    compute_ms: f64,
    /// Attention, norms, head.
    other_ms: f64,
    /// The head's part of that.
    head_ms: f64,
    bytes_read_per_token: f64,
    /// Of the device while reads were in flight; 0 without reads.
    read_bytes_per_s: f64,
    /// Shares of the FFN's neurons.
    selected: f64,
    missed: f64,
    /// Where `selected` and `missed` are from.
    activity: String,
    /// Tokens after the prompt until every slot was filled; `None` where trying that took too long.
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
    passes: Vec<FrontPass>,
    warm_up_tokens: Option<usize>,
    /// Layers of the model for each of the front.
    times: f64,
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
    let expected = Expected::of(folder, plan)?;
    let spec = FrontSpec::new(folder, plan, &model.options, expected.figures.as_ref());
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
    })
}

fn measured(front: &mut Front) -> Result<Vec<FrontPass>> {
    let started = Instant::now();
    let mut passes = Vec::new();
    while passes.len() < TOKENS_MIN
        || (passes.len() < TOKENS_MAX && started.elapsed() < TOKENS_TIME)
    {
        passes.push(front.pass(1)?);
    }
    Ok(passes)
}

fn ms(time: Duration) -> f64 {
    1000.0 * time.as_secs_f64()
}

impl Tried {
    /// With I/O as tried, or in proportion to a share `missed` that is known better than a trace can tell.
    fn prediction(&self, missed: Option<f64>) -> Prediction {
        let median = |of: &dyn Fn(&FrontPass) -> f64| Spread::of(self.passes.iter().map(of)).median;
        let mean = |of: &dyn Fn(&FrontPass) -> f64| {
            self.passes.iter().map(of).sum::<f64>() / self.passes.len().max(1) as f64
        };
        let head_ms = median(&|pass| ms(pass.times.head));
        let neurons = mean(&|pass| pass.ffn.neurons as f64).max(1.0);
        let tried = mean(&|pass| pass.ffn.misses as f64) / neurons;
        let missed = missed.filter(|_| tried > 0.0).unwrap_or(tried);
        let of_tried = if tried > 0.0 { missed / tried } else { 1.0 };
        let tried_io_ms = self.times * median(&|pass| ms(pass.ffn.io));
        let io_ms = of_tried * tried_io_ms;
        let layers_ms = self.times * median(&|pass| ms(pass.times.layers));
        let token_ms = (layers_ms - tried_io_ms).max(0.0) + io_ms + head_ms;
        let memory_ms = self.times * median(&|pass| ms(pass.ffn.memory));
        let compute_ms = self.times * median(&|pass| ms(pass.ffn.select + pass.ffn.compute));
        let in_flight_s = mean(&|pass| pass.ffn.in_flight.as_secs_f64());
        let record_bytes = mean(&|pass| pass.ffn.bytes_read as f64);
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
            head_ms,
            bytes_read_per_token: of_tried * self.times * mean(&|pass| pass.bytes_read as f64),
            read_bytes_per_s: record_bytes / in_flight_s.max(1e-9),
            selected: mean(&|pass| pass.ffn.selected_fraction()),
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
            Some(tokens) => format!("once the slots are full, {tokens} tokens after the prompt"),
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
