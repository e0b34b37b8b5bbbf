//! What each token of a layer has to read: its neurons that are not in a slot, pass by pass.
//!
//! A token that selects no more than there are slots has one pass. One that selects more streams through a few slots in
//! ascending passes, each read by itself, so that neighbours in the file of which one is in a later pass share nothing.
//!
//! Reading goes by misses. Neurons that many tokens share stay in memory, whatever order the file has; which of the
//! others come together is what an order can make use of.
//!
//! Not here: what neurons have to do with each other (`together`).

use std::ops::Range;

use candle_wick::{CachePolicy, LayerTrace, NeuronCache, PASS_NEURONS_MAX};

/// A set of neurons for each pass of each token, one after the other.
#[derive(Debug, Default)]
pub(crate) struct TokenSets {
    /// Where each set ends in `neurons`.
    ends: Vec<usize>,
    neurons: Vec<u32>,
    /// How many sets there are up to the end of each token.
    sets_to: Vec<usize>,
}

impl TokenSets {
    /// What the tokens of `trace` miss with `slots` slots, by the engine's own books; without the tokens before the
    /// slots were full, which miss everything.
    pub(crate) fn misses(trace: &LayerTrace, slots: usize) -> Self {
        let width = trace.intermediate_size();
        let slots = slots.max(2).min(width);
        let mut cache = NeuronCache::new(width, slots, CachePolicy::default(), None);
        let mut is_full = false;
        let mut sets = Self::default();
        for selection in trace.iter() {
            let plan = cache.plan(selection, PASS_NEURONS_MAX);
            for pass in plan.passes().iter().filter(|_| is_full) {
                let misses = pass.clone().filter(|position| plan.is_miss(*position));
                sets.neurons
                    .extend(misses.map(|position| selection[position]));
                sets.ends.push(sets.neurons.len());
            }
            if is_full {
                sets.sets_to.push(sets.ends.len());
            }
            cache.commit(selection, plan, 1, |_| 1);
            is_full = is_full || cache.used_count() == slots;
        }
        sets
    }

    /// How many tokens there are.
    pub(crate) fn tokens(&self) -> usize {
        self.sets_to.len()
    }

    /// The sets of token `token`, one a pass, ascending ids within and from one to the next.
    pub(crate) fn of_token(&self, token: usize) -> impl Iterator<Item = &[u32]> {
        let before = |list: &[usize], at: usize| at.checked_sub(1).map_or(0, |at| list[at]);
        (before(&self.sets_to, token)..self.sets_to[token])
            .map(move |set| &self.neurons[before(&self.ends, set)..self.ends[set]])
    }

    /// The sets of these tokens.
    pub(crate) fn of_tokens(&self, tokens: Range<usize>) -> impl Iterator<Item = &[u32]> {
        tokens.flat_map(|token| self.of_token(token))
    }

    /// Neurons of all tokens, added up.
    pub(crate) fn entries(&self) -> usize {
        self.neurons.len()
    }
}
