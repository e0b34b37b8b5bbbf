//! Which neurons are truly active for which tokens, one bit each: what predictors learn from and are judged by.
//!
//! Not here: what counts as active (`Truth`).

use candle::{Device, Result, Tensor};

/// Bits of a layer on a text.
pub(super) struct Labels {
    neurons: usize,
    words_per_token: usize,
    words: Vec<u64>,
    active: u64,
}

impl Labels {
    /// No tokens of a layer with `neurons` neurons.
    pub(super) fn new(neurons: usize) -> Self {
        Self {
            neurons,
            words_per_token: neurons.div_ceil(64),
            words: Vec::new(),
            active: 0,
        }
    }

    /// Appends a token by its neurons, in order.
    pub(super) fn push(&mut self, is_active: impl Iterator<Item = bool>) {
        let first = self.words.len();
        self.words.resize(first + self.words_per_token, 0);
        for (neuron, is_active) in is_active.enumerate().take(self.neurons) {
            self.words[first + neuron / 64] |= u64::from(is_active) << (neuron % 64);
            self.active += u64::from(is_active);
        }
    }

    fn token(&self, token: usize) -> impl Iterator<Item = bool> + '_ {
        let first = token * self.words_per_token;
        let words = &self.words[first..first + self.words_per_token];
        (0..self.neurons).map(move |neuron| words[neuron / 64] >> (neuron % 64) & 1 == 1)
    }

    /// Active of all.
    pub(super) fn active_fraction(&self) -> f64 {
        let tokens = self.words.len() / self.words_per_token.max(1);
        self.active as f64 / (tokens * self.neurons).max(1) as f64
    }

    /// 1 for active and 0 for others, `(tokens, neurons)`, of these tokens.
    pub(super) fn rows(&self, tokens: &[u32], device: &Device) -> Result<Tensor> {
        let mut values = Vec::with_capacity(tokens.len() * self.neurons);
        for &token in tokens {
            values.extend(
                self.token(token as usize)
                    .map(|active| f32::from(u8::from(active))),
            );
        }
        Tensor::from_vec(values, (tokens.len(), self.neurons), device)
    }

    /// The share of all neurons that has to be selected so that a share of `recall` of the active ones is, when
    /// those with the highest of `scores` are; one row of scores a token, from the first token on.
    pub(super) fn needed_fraction(&self, scores: &[f32], recall: f64) -> f64 {
        let rows = scores.chunks(self.neurons.max(1)).enumerate();
        let mut of_active: Vec<f32> = rows
            .flat_map(|(token, scores)| scores.iter().zip(self.token(token)))
            .filter_map(|(score, is_active)| is_active.then_some(*score))
            .collect();
        match threshold_for(&mut of_active, recall) {
            None => 0.0,
            Some(threshold) => {
                let is_needed =
                    |score: &&f32| threshold == f32::NEG_INFINITY || **score >= threshold;
                let needed = scores.iter().filter(is_needed).count();
                needed as f64 / scores.len() as f64
            }
        }
    }
}

/// The largest threshold that a share of `recall` of the scores reaches; `None` without scores. A score that is no number is never
/// reached, so it counts as missed.
pub(super) fn threshold_for(scores: &mut [f32], recall: f64) -> Option<f32> {
    for score in scores.iter_mut().filter(|score| score.is_nan()) {
        *score = f32::NEG_INFINITY;
    }
    if scores.is_empty() {
        return None;
    }
    let missed = ((1.0 - recall) * scores.len() as f64) as usize;
    let missed = missed.min(scores.len() - 1);
    let (_, threshold, _) = scores.select_nth_unstable_by(missed, f32::total_cmp);
    Some(*threshold)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(tokens: &[&[u8]]) -> Labels {
        let mut labels = Labels::new(tokens[0].len());
        for token in tokens {
            labels.push(token.iter().map(|bit| *bit == 1));
        }
        labels
    }

    #[test]
    fn bits_come_back_in_any_order_of_tokens_beyond_a_word() {
        let long: Vec<u8> = (0..70).map(|i| u8::from(i % 3 == 0)).collect();
        let labels = labels(&[&[0; 70], &long, &[1; 70]]);
        let rows = labels.rows(&[2, 1], &Device::Cpu).unwrap();
        let rows = rows.to_vec2::<f32>().unwrap();
        assert_eq!(rows[0], [1.0; 70]);
        let expected: Vec<f32> = long.iter().map(|bit| f32::from(*bit)).collect();
        assert_eq!(rows[1], expected);
        assert_eq!(labels.active_fraction(), (24.0 + 70.0) / 210.0);
    }

    #[test]
    fn what_is_needed_counts_all_that_score_as_high() {
        let labels = labels(&[&[1, 0, 0, 1], &[0, 0, 1, 1]]);
        let scores = [0.9, 0.8, 0.1, 0.7, 0.6, 0.2, 0.3, 0.5];
        assert_eq!(labels.needed_fraction(&scores, 1.0), 6.0 / 8.0);
        assert_eq!(labels.needed_fraction(&scores, 0.75), 5.0 / 8.0);
        assert_eq!(Labels::new(4).needed_fraction(&[], 0.9), 0.0);
        // A pair that gives no numbers needs everyone, and is not the best of all.
        assert_eq!(labels.needed_fraction(&[f32::NAN; 8], 0.9), 1.0);
    }
}
