//! How much of a layer some consecutive tokens use together ("LLM in a flash", section 3.1 and figure 4a).
//!
//! The paper's `s_agg(k)`, the aggregated neuron usage, is the share of the layer that at least one of `k` consecutive
//! tokens has. What a token adds to the window before it, `s_agg(k + 1) - s_agg(k)`, has to be read when exactly the
//! last `k` tokens' neurons are kept.

use candle_wick::LayerTrace;

/// Longest window that is looked at.
pub(crate) const WINDOW_MAX: usize = 32;

/// Neurons of one layer by the length of a window: entry `k - 1` is for `k` tokens. Sums over `windows` and `tokens`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// In at least one token of a window, added up over all windows.
    pub(crate) union: Vec<u64>,
    /// In a token and in none of the window before it, added up over all tokens that have so many before them.
    pub(crate) fresh: Vec<u64>,
}

impl Usage {
    /// Of a trace of at least two tokens; windows are as long as one token after them leaves room for, at most
    /// [`WINDOW_MAX`].
    pub(crate) fn of(layer: &LayerTrace) -> Self {
        let tokens = layer.tokens();
        let longest = WINDOW_MAX.min(tokens.saturating_sub(1));
        let mut usage = Self {
            union: vec![0; longest],
            fresh: vec![0; longest],
        };
        // The first token in which a neuron could be anew: 0, or the one after its last use.
        let mut unused_since = vec![0; layer.intermediate_size()];
        for (token, neurons) in layer.iter().enumerate() {
            for &neuron in neurons {
                let since = std::mem::replace(&mut unused_since[neuron as usize], token + 1);
                let unused = token - since;
                for window in 1..=longest {
                    // Windows in which this is the neuron's first use start at one of these.
                    let first = since.max((token + 1).saturating_sub(window));
                    let last = token.min(tokens - window);
                    usage.union[window - 1] += (last + 1).saturating_sub(first) as u64;
                    let is_fresh = token >= window && (unused >= window || since == 0);
                    usage.fresh[window - 1] += u64::from(is_fresh);
                }
            }
        }
        usage
    }

    /// How many windows of `window` tokens there are in a trace of `tokens`.
    pub(crate) fn windows(window: usize, tokens: usize) -> usize {
        tokens - window + 1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::window::tests::layer_trace;

    #[test]
    fn sums_are_those_of_every_window_looked_at() {
        let sets: Vec<Vec<u32>> = (0..50u32)
            .map(|token| {
                let is_on = |n: &u32| (token * 7 + n * n * 3 + token * n) % 11 < 3 + n % 3;
                (0..12).filter(is_on).collect()
            })
            .collect();
        let usage = Usage::of(&layer_trace(12, &sets));
        assert_eq!(usage.union.len(), WINDOW_MAX);
        for window in 1..=WINDOW_MAX {
            let union_of =
                |sets: &[Vec<u32>]| -> BTreeSet<u32> { sets.iter().flatten().copied().collect() };
            let unions = sets.windows(window).map(|sets| union_of(sets).len() as u64);
            assert_eq!(usage.union[window - 1], unions.sum::<u64>(), "{window}");
            assert_eq!(sets.windows(window).len(), Usage::windows(window, 50));
            let fresh = sets.windows(window + 1).map(|sets| {
                let before = union_of(&sets[..window]);
                sets[window].iter().filter(|n| !before.contains(n)).count() as u64
            });
            assert_eq!(usage.fresh[window - 1], fresh.sum::<u64>(), "{window}");
        }
    }

    #[test]
    fn short_traces_have_short_windows() {
        for tokens in 0..4 {
            let sets = vec![vec![0, 2]; tokens];
            let usage = Usage::of(&layer_trace(3, &sets));
            assert_eq!(usage.union.len(), tokens.saturating_sub(1));
            assert!(usage.fresh.iter().all(|fresh| *fresh == 0));
        }
    }
}
