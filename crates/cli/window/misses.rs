//! How many neurons have to be read when a trace runs through a cache: by policy, and at the very least.
//!
//! Policies are tried on the program's own `NeuronCache`. A token's neurons must all be in a slot for the token, and
//! the cache starts empty. Nobody does better than Belady's rule, which knows the future: who leaves is the one whose
//! next use is farthest away. It keeps to the same terms: what a token needs takes a slot and does not bypass the cache.

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

/// The fewest neurons that any cache of `slot_count` slots reads; `None` where a token has more neurons than that, which
/// then stream through the slots.
pub(crate) fn fewest_misses(layer: &LayerTrace, slot_count: usize) -> Option<u64> {
    let next_uses = next_uses(layer);
    let mut next_uses = &next_uses[..];
    // A resident's next use.
    let mut resident = vec![None; layer.intermediate_size()];
    // Residents, latest next use first; with entries that another use has made obsolete.
    let mut queue = BinaryHeap::new();
    let (mut resident_count, mut misses) = (0, 0);
    for neurons in layer.iter() {
        if neurons.len() > slot_count {
            return None;
        }
        let is_missing = |neuron: &&u32| resident[**neuron as usize].is_none();
        let missing = neurons.iter().filter(is_missing).count();
        misses += missing as u64;
        while resident_count + missing > slot_count {
            // The token's own neurons are used soonest of all, so they are never reached here.
            let (next_use, neuron) = queue.pop().expect("every resident is queued");
            if resident[neuron as usize] == Some(next_use) {
                resident[neuron as usize] = None;
                resident_count -= 1;
            }
        }
        resident_count += missing;
        let (of_token, rest) = next_uses.split_at(neurons.len());
        next_uses = rest;
        for (&neuron, &next_use) in neurons.iter().zip(of_token) {
            resident[neuron as usize] = Some(next_use);
            queue.push((next_use, neuron));
        }
    }
    Some(misses)
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
    fn tried(width: u32, sets: &[Vec<u32>], slot_count: usize) -> Option<u64> {
        let mut costs = BTreeMap::from([(0u32, 0u64)]);
        for set in sets {
            let needed = set.iter().fold(0, |bits, neuron| bits | 1 << neuron);
            let mut after = BTreeMap::new();
            for (residents, cost) in costs {
                let cost = cost + u64::from((needed & !residents).count_ones());
                for kept in 0..1u32 << width {
                    let is_possible = kept & !(residents | needed) == 0 && needed & !kept == 0;
                    if is_possible && kept.count_ones() as usize <= slot_count {
                        let best = after.entry(kept).or_insert(cost);
                        *best = cost.min(*best);
                    }
                }
            }
            costs = after;
        }
        costs.into_values().min()
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
        let mut compared = 0;
        for seed in 0..300 {
            let sets = sets(6, 9, seed);
            let layer = layer_trace(6, &sets);
            for slot_count in 2..6 {
                let fewest = fewest_misses(&layer, slot_count);
                assert_eq!(fewest, tried(6, &sets, slot_count), "{sets:?} {slot_count}");
                compared += usize::from(fewest.is_some());
            }
        }
        assert!(compared > 500, "{compared}");
    }

    #[test]
    fn every_policy_reads_at_least_the_bound_and_with_room_for_all_exactly_it() {
        for seed in 0..20 {
            let layer = layer_trace(60, &sets(60, 80, seed));
            for slot_count in [36, 45, 60] {
                let fewest = fewest_misses(&layer, slot_count).unwrap();
                for policy in CachePolicy::ALL {
                    let read = misses(&layer, slot_count, policy, None);
                    assert!(read >= fewest, "{policy}: {read} of {fewest}");
                    assert!(misses(&layer, slot_count, policy, Some(1)) >= read);
                    if slot_count == 60 {
                        let used = layer.counts().iter().filter(|count| **count > 0).count();
                        assert_eq!((read, fewest), (used as u64, used as u64));
                    }
                }
            }
            // Too few slots for a token: streamed, and nobody's bound.
            assert!(misses(&layer, 8, CachePolicy::Lru, None) > 0);
            assert_eq!(fewest_misses(&layer, 8), None);
        }
    }

    /// Neurons that come and go beside some that stay: counting tells them apart, age does not.
    #[test]
    fn policies_differ_where_they_should() {
        let sets: Vec<Vec<u32>> = (0..200u32)
            .map(|token| match token % 4 {
                0 => (0..10).collect(),
                turn => (10 + (token / 4 * 3 + turn) % 40 / 5 * 5..)
                    .take(5)
                    .collect(),
            })
            .collect();
        let layer = layer_trace(60, &sets);
        let [lru, lfu] = CachePolicy::ALL.map(|policy| misses(&layer, 20, policy, None));
        assert!(lfu < lru, "{lfu} of {lru}");
        let eager = misses(&layer, 60, CachePolicy::Lru, Some(2));
        assert!(eager > misses(&layer, 60, CachePolicy::Lru, None));
    }
}
