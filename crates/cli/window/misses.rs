//! How many neurons have to be read when a trace runs through a cache: by policy, and at the very least.
//!
//! Policies are tried on the program's own `NeuronCache`, empty at first. Nobody does better than Belady's rule, which
//! knows the future: who leaves is the one whose next use is farthest away. It keeps to the same terms: all that a token
//! needs is in a slot at once, nothing bypasses the cache. Where a token has more neurons than there are slots, they
//! stream through them, and the rule may keep whichever it likes of what was there and what came by.

use std::collections::BinaryHeap;

use candle_wick::{CachePolicy, LayerTrace, NeuronCache, PASS_NEURONS};

/// Next use of a neuron that is not used again.
const NEVER: u32 = u32::MAX;

/// Neurons read, over all tokens, by a cache of `slot_count` slots.
pub(crate) fn misses(
    layer: &LayerTrace,
    slot_count: usize,
    policy: CachePolicy,
    window_tokens: Option<usize>,
) -> u64 {
    let mut cache = NeuronCache::new(layer.intermediate_size(), slot_count, policy, window_tokens);
    let mut misses = 0;
    for neurons in layer.iter() {
        let plan = cache.plan(neurons, PASS_NEURONS);
        misses += plan.miss_count() as u64;
        cache.commit(neurons, plan, 1, |_| 1);
    }
    misses
}

/// The fewest neurons that any cache of `slot_count` slots reads.
pub(crate) fn fewest_misses(layer: &LayerTrace, slot_count: usize) -> u64 {
    let next_uses = next_uses(layer);
    let mut next_uses = &next_uses[..];
    let mut residents = Residents::new(layer.intermediate_size());
    let mut misses = 0;
    for (token, neurons) in layer.iter().enumerate() {
        let missing = neurons.iter().filter(|neuron| !residents.has(**neuron));
        let missing = missing.count();
        misses += missing as u64;
        if neurons.len() <= slot_count {
            // The token's own neurons have the soonest next use of all, which is now: they stay.
            residents.keep_soonest(slot_count - missing);
        }
        let (of_token, rest) = next_uses.split_at(neurons.len());
        next_uses = rest;
        for (&neuron, &next_use) in neurons.iter().zip(of_token) {
            debug_assert!(next_use as usize > token);
            residents.insert(neuron, next_use);
        }
        residents.keep_soonest(slot_count);
    }
    misses
}

/// The neurons in a cache, by their next use.
struct Residents {
    next_use: Vec<Option<u32>>,
    count: usize,
    /// Latest next use first; with entries that another use has made obsolete.
    queue: BinaryHeap<(u32, u32)>,
}

impl Residents {
    fn new(neuron_count: usize) -> Self {
        Self {
            next_use: vec![None; neuron_count],
            count: 0,
            queue: BinaryHeap::new(),
        }
    }

    fn has(&self, neuron: u32) -> bool {
        self.next_use[neuron as usize].is_some()
    }

    fn insert(&mut self, neuron: u32, next_use: u32) {
        let before = self.next_use[neuron as usize].replace(next_use);
        self.count += usize::from(before.is_none());
        self.queue.push((next_use, neuron));
    }

    /// Lets those go whose next use is the latest, until `count` are left at most.
    fn keep_soonest(&mut self, count: usize) {
        while self.count > count {
            let (next_use, neuron) = self.queue.pop().expect("every resident is queued");
            let resident = &mut self.next_use[neuron as usize];
            if *resident == Some(next_use) {
                *resident = None;
                self.count -= 1;
            }
        }
    }
}

/// For each neuron of each token, the next token that has it.
fn next_uses(layer: &LayerTrace) -> Vec<u32> {
    let mut next_of = vec![NEVER; layer.intermediate_size()];
    let mut next_uses = vec![NEVER; layer.entries()];
    let mut end = layer.entries();
    for (token, neurons) in layer.iter().enumerate().rev() {
        let start = end - neurons.len();
        for (next_use, &neuron) in next_uses[start..end].iter_mut().zip(neurons) {
            *next_use = std::mem::replace(&mut next_of[neuron as usize], token as u32);
        }
        end = start;
    }
    next_uses
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::window::tests::layer_trace;

    /// The best of all caches, tried one by one: from each set of residents to each that a token may leave behind.
    fn tried(width: u32, sets: &[Vec<u32>], slot_count: usize) -> u64 {
        let mut costs = BTreeMap::from([(0u32, 0u64)]);
        for set in sets {
            let needed = set.iter().fold(0, |bits, neuron| bits | 1 << neuron);
            let all_fit = set.len() <= slot_count;
            let mut after = BTreeMap::new();
            for (residents, cost) in costs {
                let cost = cost + u64::from((needed & !residents).count_ones());
                for kept in 0..1u32 << width {
                    let is_there = kept & !(residents | needed) == 0;
                    let holds = needed & !kept == 0 || !all_fit;
                    if is_there && holds && kept.count_ones() as usize <= slot_count {
                        let best = after.entry(kept).or_insert(cost);
                        *best = cost.min(*best);
                    }
                }
            }
            costs = after;
        }
        costs.into_values().min().unwrap()
    }

    /// Sets without a pattern.
    fn sets(width: u32, tokens: usize, seed: u64) -> Vec<Vec<u32>> {
        let mut state = seed;
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state >> 40
        };
        let token = |_| (0..width).filter(|_| next() % 3 == 0).collect();
        (0..tokens).map(token).collect()
    }

    #[test]
    fn no_cache_reads_less_and_one_reads_as_little() {
        for seed in 0..300 {
            let sets = sets(6, 9, seed);
            let layer = layer_trace(6, &sets);
            for slot_count in 2..7 {
                let fewest = fewest_misses(&layer, slot_count);
                assert_eq!(fewest, tried(6, &sets, slot_count), "{sets:?} {slot_count}");
            }
        }
    }

    #[test]
    fn every_policy_reads_at_least_the_bound_and_with_room_for_all_exactly_it() {
        for seed in 0..20 {
            let layer = layer_trace(60, &sets(60, 80, seed));
            // The first is too few for a token: streamed.
            for slot_count in [8, 36, 45, 60] {
                let fewest = fewest_misses(&layer, slot_count);
                for policy in CachePolicy::ALL {
                    let read = misses(&layer, slot_count, policy, None);
                    assert!(read >= fewest, "{policy}: {read} of {fewest}");
                    if slot_count == 60 {
                        let used = layer.counts().iter().filter(|count| **count > 0).count();
                        assert_eq!((read, fewest), (used as u64, used as u64));
                    }
                }
            }
        }
    }

    /// Neurons that come and go beside some that stay: counting tells them apart, age does not.
    #[test]
    fn policies_differ_where_they_should() {
        let sets: Vec<Vec<u32>> = (0..200u32)
            .map(|token| match token % 4 {
                0 => (0..10).collect(),
                turn => {
                    let first = 10 + (token / 4 * 3 + turn) % 8 * 5;
                    (first..first + 5).collect()
                }
            })
            .collect();
        let layer = layer_trace(60, &sets);
        let [lru, lfu] = CachePolicy::ALL.map(|policy| misses(&layer, 20, policy, None));
        assert!(lfu < lru, "{lfu} of {lru}");
        let eager = misses(&layer, 60, CachePolicy::Lru, Some(2));
        assert!(eager > misses(&layer, 60, CachePolicy::Lru, None));
    }
}
