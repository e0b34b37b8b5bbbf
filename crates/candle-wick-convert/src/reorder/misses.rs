//! What each token of a layer has to read: its neurons that are not in a slot.
//!
//! Reading goes by misses. Neurons that many tokens share stay in memory, whatever order the file has; which of the
//! others come together is what an order can make use of.
//!
//! Not here: what neurons have to do with each other (`together`).

use candle_wick::{CachePolicy, LayerTrace, NeuronCache};

/// A set of neurons for each token, one after the other.
#[derive(Debug, Default)]
pub(crate) struct TokenSets {
    /// Where each set ends in `neurons`.
    ends: Vec<usize>,
    neurons: Vec<u32>,
}

impl TokenSets {
    /// What the tokens of `trace` miss with `slots` slots, by the engine's own books; without the tokens before the
    /// slots were full, which miss everything.
    pub(crate) fn misses(trace: &LayerTrace, slots: usize) -> Self {
        let width = trace.intermediate_size();
        let slots = slots.max(2).min(width);
        let mut cache = NeuronCache::new(width, slots, CachePolicy::Lru, None);
        let mut is_full = false;
        let mut sets = Self::default();
        for selection in trace.iter() {
            let plan = cache.plan(selection, selection.len().max(1));
            if is_full {
                let misses = (0..selection.len()).filter(|position| plan.is_miss(*position));
                sets.neurons
                    .extend(misses.map(|position| selection[position]));
                sets.ends.push(sets.neurons.len());
            }
            cache.commit(selection, plan, 1, |_| 0);
            is_full = is_full || cache.used_count() == slots;
        }
        sets
    }

    /// The set of each token, ascending ids.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        (0..self.ends.len()).map(|token| {
            let start = token.checked_sub(1).map_or(0, |before| self.ends[before]);
            &self.neurons[start..self.ends[token]]
        })
    }

    /// Neurons of all tokens, added up.
    pub(crate) fn entries(&self) -> usize {
        self.neurons.len()
    }
}
