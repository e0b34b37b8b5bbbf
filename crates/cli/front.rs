//! The first layers of a model at work: what predictions are made of, and what settings are tried on.
//!
//! Layers of a model are alike, so a few of them, placed as the plan places all, show what each takes: with the
//! engine, the kernels and the threads that a run would have. They get the mean of the planned slots. Whoever chooses
//! neurons with predictors gets a made-up trace of the activity that is known of the model ([`activity`](crate::activity)),
//! since input that means nothing selects nothing that says anything.
//!
//! Not here: what the times mean for the whole model (`predict`), which settings are better (`tune`).

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use candle_wick::{BudgetPlan, FlashFolder, TraceFigures};
use candle_wick_models::{LoadOptions, LoadedModel};

use crate::draw::Draw;
use crate::pass::{pass, Pass};
use crate::synthetic::made_up;

/// Weights to go through for each token: what lies in a processor's cache stays small beside that.
const FRONT_BYTES: u64 = 256 << 20;
const LAYERS_MIN: usize = 2;
/// Slots fill up no longer than this.
const WARM_UP_TIME: Duration = Duration::from_secs(8);
const WARM_UP_TOKENS: usize = 2000;
/// So many tokens in a row that miss nothing say that later ones will not either.
const QUIET_TOKENS: usize = 8;

/// Which layers to load, and how.
#[derive(Clone)]
pub(crate) struct FrontSpec {
    /// Of the whole model, with the mean of its slots for each layer.
    plan: BudgetPlan,
    options: LoadOptions,
    pub(crate) layers: usize,
    /// Layers of the whole model.
    pub(crate) layers_of_model: usize,
    /// Share of the bytes of layers' matrices (attention) that are read from flash for each token.
    pub(crate) streamed_share: f64,
}

/// The layers, loaded.
pub(crate) struct Front {
    model: LoadedModel,
    draw: Draw,
    slots: usize,
    /// What loading took.
    pub(crate) load: Duration,
}

impl FrontSpec {
    /// The first layers of `folder` under `plan`; `figures` is the activity of a selector with predictors.
    pub(crate) fn new(
        folder: &FlashFolder,
        plan: &BudgetPlan,
        options: &LoadOptions,
        figures: Option<&TraceFigures>,
    ) -> Self {
        let manifest = folder.manifest();
        let widths = || manifest.layers.iter().map(|layer| layer.intermediate_size);
        let layers_of_model = manifest.layers.len();
        let layer_bytes = manifest.dense_weight_bytes / layers_of_model.max(1) as u64;
        let layers = (FRONT_BYTES / layer_bytes.max(1)) as usize + 1;
        let mut plan = plan.clone();
        let slots: usize = plan.slots_per_layer.iter().sum();
        let width = widths().max().unwrap_or(0);
        if widths().all(|other| other == width) {
            let mean = slots as f64 / layers_of_model.max(1) as f64;
            plan.slots_per_layer.fill(mean.round() as usize);
        }
        let trace = figures
            .filter(|_| plan.selector.form().is_some())
            .map(|figures| made_up(folder, figures));
        Self {
            streamed_share: streamed_share(folder, &plan),
            plan,
            options: LoadOptions {
                trace,
                ..options.clone()
            },
            layers: layers
                .clamp(LAYERS_MIN, (layers_of_model / 2).max(LAYERS_MIN))
                .min(layers_of_model),
            layers_of_model,
        }
    }

    /// The same with other settings: they change no plan, for the sake of comparing.
    pub(crate) fn with_window(&self, window_tokens: Option<usize>) -> Self {
        let mut spec = self.clone();
        spec.plan.window_tokens = window_tokens;
        spec
    }

    /// The same with every matrix of a layer read from flash, or with none.
    pub(crate) fn with_streamed(&self, folder: &FlashFolder, is_streamed: bool) -> Self {
        let mut spec = self.clone();
        spec.plan.streamed.retain(|name| !is_of_layer(name));
        if is_streamed {
            let matrices = layer_matrices(folder).map(|(name, _)| name.clone());
            spec.plan.streamed.extend(matrices);
        }
        spec
    }

    /// Bytes of the matrices that are read from flash for each token: all of them, in whole.
    pub(crate) fn streamed_bytes(&self, folder: &FlashFolder) -> u64 {
        let is_streamed = |name: &String| self.plan.streamed.contains(name);
        let streamed = folder
            .resident_tensors()
            .filter(|(name, _)| is_streamed(name));
        streamed.map(|(_, extent)| extent.len_bytes).sum()
    }

    pub(crate) fn load(&self, folder: &FlashFolder) -> Result<Front> {
        let started = Instant::now();
        let model = LoadedModel::load_front(
            folder.clone(),
            self.plan.clone(),
            self.layers,
            &self.options,
        )?;
        Ok(Front {
            model,
            draw: Draw::new(),
            slots: self.plan.slots_per_layer.iter().take(self.layers).sum(),
            load: started.elapsed(),
        })
    }

    /// Weights of the loaded layers and all that belongs to no layer, in DRAM.
    pub(crate) fn weight_bytes(&self, folder: &FlashFolder) -> u64 {
        let share = self.layers as f64 / self.layers_of_model.max(1) as f64;
        let streamed = |name: &String| self.plan.streamed.contains(name);
        let rest: u64 = folder
            .resident_tensors()
            .filter(|(name, _)| !is_of_layer(name) && !streamed(name))
            .map(|(_, extent)| extent.len_bytes)
            .sum();
        rest + (self.plan.weight_bytes.saturating_sub(rest) as f64 * share) as u64
    }
}

/// Names of layers' tensors have the layer's number as a part of their own.
fn is_of_layer(name: &str) -> bool {
    name.split('.').any(|part| part.parse::<usize>().is_ok())
}

/// Name and bytes of every matrix of a layer that may be streamed.
fn layer_matrices(folder: &FlashFolder) -> impl Iterator<Item = (&String, u64)> {
    folder
        .resident_tensors()
        .filter(|(name, extent)| extent.shape.len() >= 2 && is_of_layer(name))
        .map(|(name, extent)| (name, extent.len_bytes))
}

fn streamed_share(folder: &FlashFolder, plan: &BudgetPlan) -> f64 {
    let all: u64 = layer_matrices(folder).map(|(_, bytes)| bytes).sum();
    let streamed: u64 = layer_matrices(folder)
        .filter(|(name, _)| plan.streamed.contains(name))
        .map(|(_, bytes)| bytes)
        .sum();
    streamed as f64 / all.max(1) as f64
}

impl Front {
    /// Computes `tokens` tokens at once, in a new sequence where the context has no room for them.
    pub(crate) fn pass(&mut self, tokens: usize) -> Result<Pass> {
        if self.model.position() + tokens > self.model.ctx() {
            self.model.reset();
        }
        let vocab_size = self.model.vocab_size() as u64;
        let ids: Vec<u32> = (0..tokens)
            .map(|_| self.draw.below(vocab_size) as u32)
            .collect();
        let (pass, logits) = pass(&mut self.model, &ids)?;
        ensure!(!logits.is_empty(), "the head gave no logits");
        Ok(pass)
    }

    /// Decodes until misses are those that stay; `filled` slots were before.
    /// Gives the tokens that took, `None` where time or patience ended first.
    pub(crate) fn warm_up(&mut self, filled: u64) -> Result<Option<usize>> {
        let started = Instant::now();
        let mut warm_up = WarmUp {
            empty_slots: (self.slots as u64).saturating_sub(filled),
            quiet_tokens: 0,
        };
        for token in 1..=WARM_UP_TOKENS {
            if warm_up.ends_with(self.pass(1)?.ffn.misses) {
                return Ok(Some(token - warm_up.quiet_tokens));
            }
            if started.elapsed() > WARM_UP_TIME {
                break;
            }
        }
        Ok(None)
    }
}

/// What tells whether a cache is as it will stay.
struct WarmUp {
    empty_slots: u64,
    /// Tokens in a row that missed nothing.
    quiet_tokens: usize,
}

impl WarmUp {
    /// Books a token; whether every slot was filled once by now, or nothing was missing for a while.
    fn ends_with(&mut self, misses: u64) -> bool {
        self.empty_slots = self.empty_slots.saturating_sub(misses);
        self.quiet_tokens = match misses {
            0 => self.quiet_tokens + 1,
            _ => 0,
        };
        self.empty_slots == 0 || self.quiet_tokens == QUIET_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_layers_are_known_by_their_number() {
        assert!(is_of_layer(
            "model.decoder.layers.11.self_attn.q_proj.weight"
        ));
        assert!(is_of_layer("transformer.h.0.mlp"));
        assert!(!is_of_layer("lm_head.weight"));
        assert!(!is_of_layer("model.norm2.weight"));
    }

    #[test]
    fn a_cache_is_warm_when_it_is_full_or_wanted_nothing_for_a_while() {
        let ends_after = |empty_slots: u64, misses: &[u64]| {
            let mut warm_up = WarmUp {
                empty_slots,
                quiet_tokens: 0,
            };
            misses.iter().position(|misses| warm_up.ends_with(*misses))
        };
        assert_eq!(ends_after(10, &[4, 0, 5, 1, 1]), Some(3));
        let mut misses = [0; 2 * QUIET_TOKENS];
        assert_eq!(ends_after(10, &misses), Some(QUIET_TOKENS - 1));
        // One token without a miss says little.
        misses[QUIET_TOKENS - 1] = 1;
        assert_eq!(ends_after(10, &misses), Some(2 * QUIET_TOKENS - 1));
        assert_eq!(ends_after(10, &[1, 0, 1, 0]), None);
    }
}
