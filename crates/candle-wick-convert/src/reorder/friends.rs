//! Why a neuron is not stored together with its closest friend, on a real trace ("LLM in a flash", appendix D).
//!
//! A neuron's closest friend is the one that fires in most of the tokens that it fires in. Reading both as one bundle would
//! bring two neurons with one request. It does not pay: a few neurons that nearly every token has are the closest friends of
//! nearly all others, so bundles bring these few again and again, though they are in memory.
//!
//! Not here: putting neurons in order without storing any twice (`arrange`).

use std::path::Path;

use candle_wick::{LayerTrace, RecordedTrace};
use rayon::prelude::*;

use super::misses::TokenSets;
use super::together::{Counters, Together};
use super::{check_resident, of_model, slots_of, thinned};
use crate::ConvertError;

/// A neuron that fires in fewer tokens has friends by chance.
const FIRINGS_MIN: usize = 10;
/// Friends whose common firing is told: the closest, the second, the fourth and the eighth.
const RANKS: [usize; 4] = [1, 2, 4, 8];

/// What is known of the friends in one layer. Shares are from 0 to 1.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct LayerFriends {
    /// Neurons of the layer.
    pub neurons: usize,
    /// Those that fire often enough to have friends; what follows is about them.
    pub with_friends: usize,
    /// Share of the tokens that a neuron fires in, in the mean.
    pub fires_in: f64,
    /// Share of a neuron's tokens that its closest, second, fourth and eighth friend fires in, in the mean.
    pub together: [f64; 4],
    /// The closest friend's share of the neuron at the lowest tenth, in the middle, and at the highest tenth.
    pub closest_deciles: [f64; 3],
    /// How many different neurons are somebody's closest friend.
    pub distinct_friends: usize,
    /// Share of the neurons whose closest friend is the most frequent one, or one of the 8 most frequent.
    pub friend_of: [f64; 2],
    /// Share of all tokens that a closest friend fires in, in the mean.
    pub friend_fires_in: f64,
    /// What bundles would read.
    pub bundles: BundleReads,
}

/// What tokens would read if each record came with that of its neuron's closest friend; a token each, in the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct BundleReads {
    /// Neurons missed: records read without bundles.
    pub misses: f64,
    /// Bundles read, two records each where the neuron has a friend.
    pub bundles: f64,
    /// Friends that were missed as well: what bundling gains.
    pub wanted: f64,
    /// Friends that an earlier bundle of the token brought already.
    pub again: f64,
    /// Friends that the token has in memory.
    pub in_memory: f64,
    /// Friends that the token has no use for.
    pub unwanted: f64,
}

/// The friends in a whole trace.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Friends {
    /// Tokens of the trace.
    pub tokens: usize,
    /// Share of each layer's neurons that is in memory.
    pub resident: f64,
    /// A layer each.
    pub layers: Vec<LayerFriends>,
}

/// Looks for the friends in the trace at `path`, and at what bundles would read with `resident` of each layer's neurons in
/// memory.
///
/// # Errors
/// The file is no trace, or the share leaves nothing to read, or everything.
pub fn friends(path: &Path, resident: f64) -> Result<Friends, ConvertError> {
    check_resident(path, resident)?;
    let trace = RecordedTrace::open(path).map_err(of_model)?;
    let layers = (0..trace.intermediate_sizes().len()).map(|index| {
        let layer = trace.layer(index).map_err(of_model)?;
        Ok(LayerFriends::of(&layer, resident))
    });
    Ok(Friends {
        tokens: trace.tokens(),
        resident,
        layers: layers.collect::<Result<_, ConvertError>>()?,
    })
}

/// The closest friends of a neuron.
struct Closest {
    first: u32,
    /// Shares by [`RANKS`].
    together: [f64; 4],
}

impl LayerFriends {
    fn of(trace: &LayerTrace, resident: f64) -> Self {
        let width = trace.intermediate_size();
        let sets = thinned(trace.iter());
        let tokens = sets.len().max(1) as f64;
        let together = Together::new(sets, width);
        let look = |counters: &mut Counters, neuron: u32| closest_to(&together, neuron, counters);
        let found: Vec<Option<Closest>> = (0..width as u32)
            .into_par_iter()
            .map_init(|| Counters::new(width), look)
            .collect();
        let known = || found.iter().flatten();
        let with_friends = known().count();
        let mean = |sum: f64| sum / with_friends.max(1) as f64;
        let fires_in = |neuron: u32| together.count(neuron) as f64 / tokens;
        let firing = (0..width as u32)
            .zip(&found)
            .filter(|(_, found)| found.is_some());
        let mut closest: Vec<f64> = known().map(|found| found.together[0]).collect();
        closest.sort_unstable_by(f64::total_cmp);
        let decile = |tenths: usize| {
            let last = closest.len().saturating_sub(1);
            closest.get(last * tenths / 10).copied().unwrap_or(0.0)
        };
        // Of how many neurons each is the closest friend.
        let mut friend_of = vec![0usize; width];
        known().for_each(|found| friend_of[found.first as usize] += 1);
        friend_of.sort_unstable_by(|a, b| b.cmp(a));
        let friends: Vec<Option<u32>> = found
            .iter()
            .map(|found| found.as_ref().map(|found| found.first))
            .collect();
        Self {
            neurons: width,
            with_friends,
            fires_in: mean(firing.map(|(neuron, _)| fires_in(neuron)).sum()),
            together: std::array::from_fn(|rank| {
                mean(known().map(|found| found.together[rank]).sum())
            }),
            closest_deciles: [1, 5, 9].map(decile),
            distinct_friends: friend_of.iter().filter(|count| **count > 0).count(),
            friend_of: [1, 8].map(|first| mean(friend_of.iter().take(first).sum::<usize>() as f64)),
            friend_fires_in: mean(known().map(|found| fires_in(found.first)).sum()),
            bundles: BundleReads::of(trace, &friends, resident),
        }
    }
}

fn closest_to(together: &Together<'_>, neuron: u32, counters: &mut Counters) -> Option<Closest> {
    let firings = together.count(neuron);
    if firings < FIRINGS_MIN {
        return None;
    }
    let most = RANKS[RANKS.len() - 1];
    let friends = together.closest(neuron, most, counters, |_| true);
    let share = |rank: usize| {
        let count = friends.get(rank - 1).map_or(0, |(_, count)| *count);
        f64::from(count) / firings as f64
    };
    Some(Closest {
        first: friends.first()?.0,
        together: RANKS.map(share),
    })
}

impl BundleReads {
    /// With the engine's cache, which keeps what tokens select; friends that come along are not kept.
    fn of(trace: &LayerTrace, friends: &[Option<u32>], resident: f64) -> Self {
        let slots = slots_of(trace.intermediate_size(), resident);
        let missed = TokenSets::misses(trace, slots);
        let first = trace.tokens() - missed.tokens();
        let mut reads = Self::default();
        // The last token, counted from 1, for which a neuron was brought.
        let mut brought = vec![0; friends.len()];
        for (token, selected) in trace.iter().skip(first).enumerate() {
            let of_token: Vec<u32> = missed.of_token(token).flatten().copied().collect();
            let (missed, token) = (&of_token, token + 1);
            reads.misses += missed.len() as f64;
            for neuron in missed {
                if brought[*neuron as usize] == token {
                    continue;
                }
                reads.bundles += 1.0;
                brought[*neuron as usize] = token;
                let Some(friend) = friends[*neuron as usize] else {
                    continue;
                };
                let came = match () {
                    () if brought[friend as usize] == token => &mut reads.again,
                    () if missed.binary_search(&friend).is_ok() => &mut reads.wanted,
                    () if selected.binary_search(&friend).is_ok() => &mut reads.in_memory,
                    () => &mut reads.unwanted,
                };
                *came += 1.0;
                brought[friend as usize] = token;
            }
        }
        let tokens = missed.tokens().max(1) as f64;
        for sum in [
            &mut reads.misses,
            &mut reads.bundles,
            &mut reads.wanted,
            &mut reads.again,
            &mut reads.in_memory,
            &mut reads.unwanted,
        ] {
            *sum /= tokens;
        }
        reads
    }
}
