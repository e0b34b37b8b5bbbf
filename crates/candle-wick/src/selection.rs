//! The neurons of a step, or its columns, as a selector hands them to the cache and to the products.
//!
//! Not here: who selects them (`selector`).

use crate::workspace::CHUNK_TOKENS_MAX;

/// The neurons of a step: the union over its tokens, and which token wants which.
#[derive(Debug, Default)]
pub(crate) struct Selection {
    /// Ascending ids.
    pub(crate) neurons: Vec<u32>,
    /// For each of them, bit `t` when token `t` selected it.
    pub(crate) wanted_by: Vec<u128>,
}

/// The bits of all of `tokens` tokens, one at least.
pub(crate) fn all_of(tokens: usize) -> u128 {
    u128::MAX >> (CHUNK_TOKENS_MAX - tokens)
}

impl Selection {
    pub(crate) fn clear(&mut self) {
        self.neurons.clear();
        self.wanted_by.clear();
    }

    pub(crate) fn push(&mut self, neuron: u32, wanted_by: u128) {
        if wanted_by != 0 {
            self.neurons.push(neuron);
            self.wanted_by.push(wanted_by);
        }
    }

    /// Hands out each token's own neurons, ascending, in a step of `tokens` tokens; they are put together in `list`.
    pub(crate) fn for_each_token(
        &self,
        tokens: usize,
        list: &mut Vec<u32>,
        mut hand_out: impl FnMut(&[u32]),
    ) {
        for token in 0..tokens {
            let all = self.neurons.iter().zip(&self.wanted_by);
            let wanted = all.filter(|(_, wanted_by)| *wanted_by >> token & 1 == 1);
            list.clear();
            list.extend(wanted.map(|(neuron, _)| *neuron));
            hand_out(list);
        }
    }

    /// Neurons selected, summed over tokens.
    pub(crate) fn selected_count(&self) -> u64 {
        self.wanted_by
            .iter()
            .map(|tokens| u64::from(tokens.count_ones()))
            .sum()
    }
}
