//! Which neurons are truly active for which tokens, one bit each: what predictors learn from and are judged by.
//!
//! Not here: what counts as active (`Truth`), where to cut scores (`cut`).

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

    /// The neurons of a token, in order.
    pub(super) fn token(&self, token: usize) -> impl Iterator<Item = bool> + '_ {
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
}
