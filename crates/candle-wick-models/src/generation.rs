//! Text generation: from the logits after a prompt to one more token, until there is a reason to stop.
//!
//! A [`Sampler`] turns logits into an id: repeat penalty, temperature, top-k, top-p, in candle's
//! implementation, so that a seed gives the same ids as candle's examples for the same logits.
//! A [`TextGenerator`] feeds each id back into the model.
//!
//! Not here: text (`tokenizer`), logits (`load`).

use candle::{Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling as Strategy};
use candle_transformers::utils::apply_repeat_penalty;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::load::LoadedModel;

/// Temperatures below this choose the most likely token, as in candle.
const TEMPERATURE_MIN: f64 = 1e-7;

/// How to choose a token; the default is always the most likely one.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 chooses the most likely token; 1 samples from the model's distribution.
    pub temperature: f64,
    /// Sample from the fewest tokens whose probabilities reach this sum.
    pub top_p: Option<f64>,
    /// Sample from this many of the most likely tokens.
    pub top_k: Option<usize>,
    /// Of the random numbers.
    pub seed: u64,
    /// Weakens tokens that were there already; 1 leaves them alone.
    pub repeat_penalty: f32,
    /// How many of the last tokens the penalty looks at.
    pub repeat_last_n: usize,
}

impl Default for Sampling {
    /// Greedy and without penalty; the seed is that of candle's examples.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: None,
            top_k: None,
            seed: 299_792_458,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
        }
    }
}

/// Chooses tokens, and remembers them for the repeat penalty.
pub struct Sampler {
    processor: LogitsProcessor,
    repeat_penalty: f32,
    repeat_last_n: usize,
    history: Vec<u32>,
}

impl Sampler {
    /// A sampler at the start of a text.
    pub fn new(sampling: &Sampling) -> Self {
        let temperature = sampling.temperature;
        let strategy = match (sampling.top_k, sampling.top_p) {
            _ if temperature < TEMPERATURE_MIN => Strategy::ArgMax,
            (None, None) => Strategy::All { temperature },
            (Some(k), None) => Strategy::TopK { k, temperature },
            (None, Some(p)) => Strategy::TopP { p, temperature },
            (Some(k), Some(p)) => Strategy::TopKThenTopP { k, p, temperature },
        };
        Self {
            processor: LogitsProcessor::from_sampling(sampling.seed, strategy),
            repeat_penalty: sampling.repeat_penalty,
            repeat_last_n: sampling.repeat_last_n,
            history: Vec::new(),
        }
    }

    /// Remembers tokens that are in the text without having been sampled.
    pub fn observe(&mut self, ids: &[u32]) {
        self.history.extend_from_slice(ids);
    }

    /// The next token after a text with these logits.
    ///
    /// # Errors
    /// A logit is infinite or no number.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        if !logits.iter().all(|logit| logit.is_finite()) {
            return Err(Error::NotFinite);
        }
        let mut logits = Tensor::new(logits, &Device::Cpu)?;
        if self.repeat_penalty != 1.0 {
            let recent = self.history.len().saturating_sub(self.repeat_last_n);
            logits = apply_repeat_penalty(&logits, self.repeat_penalty, &self.history[recent..])?;
        }
        let id = self.processor.sample(&logits)?;
        self.history.push(id);
        Ok(id)
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stop {
    /// The model ended it.
    Eos,
    /// It has as many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// Somebody asked to stop.
    Interrupted,
}

/// Writes on from a prompt, token by token.
pub struct TextGenerator<'a> {
    model: &'a mut LoadedModel,
    sampler: Sampler,
    /// After the last token that the model has seen.
    logits: Vec<f32>,
    /// Sampled, and not yet seen by the model.
    pending: Option<u32>,
    tokens_left: usize,
    seen_count: usize,
    stop: Option<Stop>,
}

impl<'a> TextGenerator<'a> {
    /// A generator of up to `tokens_max` tokens that goes on wherever `model` is.
    pub fn new(model: &'a mut LoadedModel, sampling: &Sampling, tokens_max: usize) -> Self {
        Self {
            model,
            sampler: Sampler::new(sampling),
            logits: Vec::new(),
            pending: None,
            tokens_left: tokens_max,
            seen_count: 0,
            stop: None,
        }
    }

    /// Feeds the prompt, before the first token is asked for.
    ///
    /// # Errors
    /// It is empty, longer than what is left of the context, or has an id outside the vocabulary.
    pub fn prompt(&mut self, ids: &[u32]) -> Result<()> {
        self.sampler.observe(ids);
        self.forward(ids)
    }

    /// The next token; `None` once there is a reason to stop.
    ///
    /// # Errors
    /// There was no prompt, or the model's weights could not be read.
    pub fn next_token(&mut self) -> Result<Option<u32>> {
        if self.tokens_left == 0 {
            self.stop.get_or_insert(Stop::Length);
        }
        if let (None, Some(id)) = (self.stop, self.pending) {
            if self.model.position() == self.model.ctx() {
                self.stop = Some(Stop::Context);
            } else {
                self.pending = None;
                self.forward(&[id])?;
            }
        }
        if self.stop.is_some() {
            return Ok(None);
        }
        if self.logits.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let id = self.sampler.sample(&self.logits)?;
        if self.model.eos_token_ids().contains(&id) {
            self.stop = Some(Stop::Eos);
            return Ok(None);
        }
        self.pending = Some(id);
        self.tokens_left -= 1;
        Ok(Some(id))
    }

    /// Why the text ended; `None` while it goes on.
    pub fn stop(&self) -> Option<Stop> {
        self.stop
    }

    /// Tokens that went through the model, those of the prompt included.
    pub fn seen_count(&self) -> usize {
        self.seen_count
    }

    /// The model at work.
    pub fn model(&self) -> &LoadedModel {
        self.model
    }

    fn forward(&mut self, ids: &[u32]) -> Result<()> {
        match self.model.forward(ids) {
            Ok(logits) => {
                self.logits = logits;
                self.seen_count += ids.len();
            }
            Err(Error::Interrupted) => self.stop = Some(Stop::Interrupted),
            Err(error) => {
                // The model forgot the text, so its last logits continue nothing.
                self.logits.clear();
                return Err(error);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.1, 2.0, -1.0, 1.9, 0.6];

    fn sampled(sampling: &Sampling, count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling);
        (0..count)
            .map(|_| sampler.sample(&LOGITS).unwrap())
            .collect()
    }

    #[test]
    fn the_default_is_greedy() {
        assert_eq!(sampled(&Sampling::default(), 5), [1; 5]);
        let cold = Sampling {
            temperature: 1e-9,
            top_k: Some(3),
            ..Default::default()
        };
        assert_eq!(sampled(&cold, 5), [1; 5]);
    }

    #[test]
    fn a_seed_gives_the_same_tokens_and_another_seed_others() {
        let warm = Sampling {
            temperature: 1.0,
            ..Default::default()
        };
        let other = Sampling {
            seed: 1,
            ..warm.clone()
        };
        assert_eq!(sampled(&warm, 50), sampled(&warm, 50));
        assert_ne!(sampled(&warm, 50), sampled(&other, 50));
        let kinds: std::collections::BTreeSet<u32> = sampled(&warm, 500).into_iter().collect();
        assert_eq!(kinds.len(), LOGITS.len());
    }

    #[test]
    fn top_k_and_top_p_leave_the_likely_ones() {
        let warm = Sampling {
            temperature: 1.0,
            ..Default::default()
        };
        let top_k = Sampling {
            top_k: Some(2),
            ..warm.clone()
        };
        let top_p = Sampling {
            top_p: Some(0.6),
            ..warm.clone()
        };
        let both = Sampling {
            top_k: Some(3),
            top_p: Some(0.3),
            ..warm
        };
        for (sampling, allowed) in [(top_k, vec![1, 3]), (top_p, vec![1, 3]), (both, vec![1])] {
            let ids = sampled(&sampling, 200);
            assert!(allowed.iter().all(|id| ids.contains(id)), "{sampling:?}");
            assert!(ids.iter().all(|id| allowed.contains(id)), "{sampling:?}");
        }
    }

    #[test]
    fn the_repeat_penalty_looks_at_the_last_tokens_only() {
        let penalty = Sampling {
            repeat_penalty: 4.0,
            repeat_last_n: 1,
            ..Default::default()
        };
        assert_eq!(sampled(&penalty, 4), [1, 3, 1, 3]);
        let mut sampler = Sampler::new(&Sampling {
            repeat_last_n: 2,
            ..penalty
        });
        sampler.observe(&[1, 3]);
        assert_eq!(sampler.sample(&LOGITS).unwrap(), 4);
    }
}
