//! Where to cut a layer's scores, and what the cut selects.

use candle::{Result, Tensor};
use candle_wick::{Activation, WindowShares, WINDOW_TOKENS};

use super::cut::Cut;
use super::factor::Factors;
use super::labels::Labels;

/// Tokens whose scores are computed together.
const ROWS: usize = 256;
/// Consecutive tokens whose selections are joined: the paper's window.
const UNION_TOKENS: usize = 5;

/// The layer itself, to know what is truly active.
pub(super) struct Truth<'a> {
    /// `(intermediate, hidden)`.
    pub(super) weight: &'a Tensor,
    /// `(intermediate)`.
    pub(super) bias: &'a Tensor,
    /// Says which pre-activations count as active.
    pub(super) activation: Activation,
}

/// What a threshold selects on a text, as shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct LayerQuality {
    /// Neurons selected when their score reaches this.
    pub threshold: f32,
    /// Selected of the truly active.
    pub recall: f32,
    /// Truly active of all.
    pub active_fraction: f32,
    /// Selected of all.
    pub selected_fraction: f32,
    /// Selected by any of 5 consecutive tokens, of all.
    pub union_fraction: f32,
    /// Selected by any of the last tokens, and by none of them, by how many those are.
    pub windows: WindowShares,
}

/// Pre-activations above this are active, in the ReLU family.
pub(super) fn activation_threshold(activation: Activation) -> f32 {
    match activation {
        Activation::FatRelu(threshold) => threshold,
        _ => 0.0,
    }
}

/// How long neurons have not been selected, counted by class: class `c` is idle for `2^(c-1)` tokens or more, and for
/// fewer than `2^c`; class 0 was selected by the last token.
type IdleCounts = [u64; WINDOW_TOKENS.len() + 1];

fn idle_class(idle_tokens: usize) -> usize {
    let bits = (usize::BITS - idle_tokens.leading_zeros()) as usize;
    bits.min(WINDOW_TOKENS.len())
}

/// The shares by window from what was idle at each token, and what was idle until it was selected.
fn window_shares(idle: &IdleCounts, woken: &IdleCounts, all: f32) -> WindowShares {
    let share = |counts: &[u64]| counts.iter().sum::<u64>() as f32 / all;
    WindowShares {
        union: std::array::from_fn(|window| share(&idle[..=window])),
        fresh: std::array::from_fn(|window| share(&woken[window + 1..])),
    }
}

impl Truth<'_> {
    /// What the deciding matrix makes of inputs `(tokens, hidden)`: `(tokens, intermediate)`.
    pub(super) fn pre_activations(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight.t()?)?.broadcast_add(self.bias)
    }

    /// Which neurons are active for the tokens of `x` `(tokens, hidden)`.
    pub(super) fn labels(&self, x: &Tensor) -> Result<Labels> {
        let mut labels = Labels::new(self.weight.dim(0)?);
        let tokens = x.dim(0)?;
        for start in (0..tokens).step_by(ROWS) {
            let rows = x.narrow(0, start, ROWS.min(tokens - start))?;
            for exact in self.pre_activations(&rows)?.to_vec2::<f32>()? {
                labels.push(exact.iter().map(|exact| self.activation.is_active(*exact)));
            }
        }
        Ok(labels)
    }

    /// Calls `each(scores, truly active pre-activations)` with `(intermediate)` values of every token of `x`.
    fn for_each_token(
        &self,
        factors: &Factors,
        x: &Tensor,
        mut each: impl FnMut(&[f32], &[f32]),
    ) -> Result<()> {
        let tokens = x.dim(0)?;
        for start in (0..tokens).step_by(ROWS) {
            let rows = x.narrow(0, start, ROWS.min(tokens - start))?;
            let scores = factors.scores(&rows)?.to_vec2::<f32>()?;
            let exact = self.pre_activations(&rows)?.to_vec2::<f32>()?;
            for (scores, exact) in scores.iter().zip(&exact) {
                each(scores, exact);
            }
        }
        Ok(())
    }

    /// The largest threshold that keeps `recall` of the truly active neurons of `x`.
    pub(super) fn threshold(&self, factors: &Factors, x: &Tensor, recall: f64) -> Result<f32> {
        let cut = Cut::find(recall, |pass| {
            self.for_each_token(factors, x, |scores, exact| {
                for (score, exact) in scores.iter().zip(exact) {
                    pass.push(*score, self.activation.is_active(*exact));
                }
            })
        })?;
        Ok(cut.threshold)
    }

    /// What `threshold` selects on `x`.
    pub(super) fn quality(
        &self,
        factors: &Factors,
        x: &Tensor,
        threshold: f32,
    ) -> Result<LayerQuality> {
        let mut counts = Counts::new(self.weight.dim(0)?);
        self.for_each_token(factors, x, |scores, exact| {
            let is_selected = scores.iter().map(|score| *score >= threshold);
            let is_active = exact.iter().map(|exact| self.activation.is_active(*exact));
            counts.push(is_selected.zip(is_active));
        })?;
        Ok(counts.quality(threshold))
    }
}

/// What was selected and what was active, over tokens that follow each other.
pub(super) struct Counts {
    tokens: u64,
    active: u64,
    selected: u64,
    found: u64,
    union: u64,
    idle_counts: IdleCounts,
    woken_counts: IdleCounts,
    /// Tokens since each neuron was selected last.
    idle: Vec<usize>,
}

impl Counts {
    /// No tokens of a layer with `neurons` neurons.
    pub(super) fn new(neurons: usize) -> Self {
        Self {
            tokens: 0,
            active: 0,
            selected: 0,
            found: 0,
            union: 0,
            idle_counts: IdleCounts::default(),
            woken_counts: IdleCounts::default(),
            idle: vec![WINDOW_TOKENS[WINDOW_TOKENS.len() - 1]; neurons],
        }
    }

    /// Appends a token: of each neuron whether it is selected, and whether it is active.
    pub(super) fn push(&mut self, neurons: impl Iterator<Item = (bool, bool)>) {
        self.tokens += 1;
        for ((is_selected, is_active), idle) in neurons.zip(&mut self.idle) {
            self.woken_counts[idle_class(*idle)] += u64::from(is_selected);
            *idle = if is_selected { 0 } else { *idle + 1 };
            self.idle_counts[idle_class(*idle)] += 1;
            self.active += u64::from(is_active);
            self.selected += u64::from(is_selected);
            self.found += u64::from(is_active && is_selected);
            self.union += u64::from(*idle < UNION_TOKENS);
        }
    }

    /// The counts as shares; `threshold` led to them.
    pub(super) fn quality(&self, threshold: f32) -> LayerQuality {
        let all = (self.tokens * self.idle.len() as u64).max(1) as f32;
        LayerQuality {
            threshold,
            recall: match self.active {
                0 => 1.0,
                active => self.found as f32 / active as f32,
            },
            active_fraction: self.active as f32 / all,
            selected_fraction: self.selected as f32 / all,
            union_fraction: self.union as f32 / all,
            windows: window_shares(&self.idle_counts, &self.woken_counts, all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_what_any_or_none_of_their_tokens_selected() {
        // One neuron that every fourth token selects, over 400 tokens.
        let (mut idle_counts, mut woken) = (IdleCounts::default(), IdleCounts::default());
        let mut idle = 3;
        for token in 0..400 {
            let is_selected = token % 4 == 0;
            woken[idle_class(idle)] += u64::from(is_selected);
            idle = if is_selected { 0 } else { idle + 1 };
            idle_counts[idle_class(idle)] += 1;
        }
        let shares = window_shares(&idle_counts, &woken, 400.0);
        assert_eq!(shares.union[..4], [0.25, 0.5, 1.0, 1.0]);
        assert_eq!(shares.fresh[..4], [0.25, 0.25, 0.0, 0.0]);
    }
}
