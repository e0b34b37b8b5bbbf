//! A made-up history of active neurons, for measuring models whose weights are random.
//!
//! Each neuron of a layer is a chain of two states, on and off. Its share of tokens follows a Zipf law over the
//! neurons (their rank is shuffled layer by layer), and what is on tends to stay on. Two numbers of that model, the
//! law's exponent and the persistence, are fitted to what a paper reports of a real model ([`TraceFigures`]).
//!
//! Which neurons a token has depends on the seed, the layer and the token's place alone, not on how tokens are grouped
//! into steps.
//!
//! Not here: whether these neurons must be read (`neuron_cache`).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What is reported of a model's activity, as shares of a layer's neurons.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceFigures {
    /// Selected for a token.
    pub selected: f64,
    /// How many consecutive tokens `union` is about.
    pub window_tokens: usize,
    /// Selected for at least one token of the window.
    pub union: f64,
    /// Selected for a token and for none of the window before it.
    pub fresh: f64,
}

/// Most neurons whose chains are weighed one by one in the fit; of more, evenly spread ones stand for all.
const FIT_POINTS: usize = 1024;
/// Exponents tried.
const EXPONENTS: usize = 61;
const EXPONENT_STEP: f64 = 0.025;

/// The chains of each layer's neurons, by rank.
#[derive(Clone, Debug)]
pub struct ActivityTrace {
    /// One for all layers, or one a layer.
    chains: Vec<Arc<[Chain]>>,
    seed: u64,
    guessed: f64,
}

/// Probabilities in units of 2^-16.
#[derive(Clone, Copy, Debug)]
struct Chain {
    /// On in a stationary trace.
    on: u32,
    /// From off to on.
    turn_on: u32,
    /// From on to off.
    turn_off: u32,
}

/// A Zipf law's exponent, and how much of the past a token keeps: 0 none, 1 everything.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Law {
    exponent: f64,
    persistence: f64,
}

impl ActivityTrace {
    /// A trace for layers of `neuron_count` neurons whose figures come as close to `figures` as the model allows.
    pub fn new(neuron_count: usize, figures: &TraceFigures, seed: u64) -> Self {
        Self::by_layer(neuron_count, std::slice::from_ref(figures), seed)
    }

    /// The same for layers that differ: the figures of each, in order.
    pub fn by_layer(neuron_count: usize, figures: &[TraceFigures], seed: u64) -> Self {
        let chains = figures.iter().map(|figures| chains(neuron_count, figures));
        Self {
            chains: chains.collect(),
            seed,
            guessed: 0.0,
        }
    }

    /// With guesses, ahead of a token, that name this share of its neurons, and for each that they miss another one, which is
    /// the more likely to be named the more often it is on.
    pub fn with_guesses(self, guessed: f64) -> Self {
        Self { guessed, ..self }
    }

    /// The history of layer `index`.
    pub(crate) fn replay(&self, index: usize, neuron_count: usize) -> Result<Replay> {
        let refused = |reason| Error::Selector {
            selector: "replay",
            reason,
        };
        let chains = match &self.chains[..] {
            [all] => all,
            layers => layers.get(index).ok_or_else(|| {
                refused(format!(
                    "a trace for {} layers, asked for layer {index}",
                    layers.len()
                ))
            })?,
        };
        if neuron_count != chains.len() {
            return Err(refused(format!(
                "a trace for layers of {} neurons, layer {index} has {neuron_count}",
                chains.len()
            )));
        }
        Ok(Replay {
            chains: chains.clone(),
            stride: coprime_stride(neuron_count, hash(self.seed, index as u64)),
            seed: hash(self.seed ^ 0x5bd1, index as u64),
            is_on: vec![false; neuron_count],
            token: 0,
            guessed: self.guessed,
            off_weight: chains.iter().map(|chain| chain.off_weight()).sum(),
        })
    }
}

/// One layer's history, at one token.
#[derive(Debug)]
pub(crate) struct Replay {
    chains: Arc<[Chain]>,
    /// Neuron `i` has rank `i * stride % neuron_count`.
    stride: usize,
    seed: u64,
    is_on: Vec<bool>,
    token: u64,
    guessed: f64,
    /// Expected sum of `on` over the neurons that are off, in units.
    off_weight: f64,
}

impl Replay {
    /// Goes `tokens` tokens on and hands out the neurons that any of them has, ascending, with a bit for each token.
    pub(crate) fn advance(&mut self, tokens: usize, mut hand_out: impl FnMut(u32, u128)) {
        let mut rank = 0;
        let mut draws = 0;
        for neuron in 0..self.is_on.len() {
            let chain = self.chains[rank];
            let mut wanted_by = 0;
            let mut is_on = self.is_on[neuron];
            for token in 0..tokens {
                let place = self.token + token as u64;
                // Four neighbours share the 64 bits of one hash.
                if tokens > 1 || neuron % 4 == 0 {
                    draws = hash(self.seed ^ (place << 24), (neuron / 4) as u64);
                }
                is_on = chain.next(place, is_on, draw(draws, neuron));
                wanted_by |= u128::from(is_on) << token;
            }
            self.is_on[neuron] = is_on;
            hand_out(neuron as u32, wanted_by);
            rank += self.stride;
            if rank >= self.chains.len() {
                rank -= self.chains.len();
            }
        }
        self.token += tokens as u64;
    }

    /// Hands out a guess of the next token's neurons, ascending; `false` where there are no guesses.
    pub(crate) fn guess(&self, mut hand_out: impl FnMut(u32)) -> bool {
        if self.guessed == 0.0 {
            return false;
        }
        let on_count = self.is_on.iter().filter(|is_on| **is_on).count();
        let right = units(self.guessed);
        let wrong = (1.0 - self.guessed) * on_count as f64 / self.off_weight.max(1.0) * 65536.0;
        let (mut rank, mut draws, mut doubts) = (0, 0, 0);
        for neuron in 0..self.is_on.len() {
            if neuron % 4 == 0 {
                let quarter = (neuron / 4) as u64;
                draws = hash(self.seed ^ (self.token << 24), quarter);
                doubts = hash(self.seed ^ (self.token << 24) ^ 0x6e55, quarter);
            }
            let chain = self.chains[rank];
            let will_be_on = chain.next(self.token, self.is_on[neuron], draw(draws, neuron));
            let named = match will_be_on {
                true => right,
                false => (wrong * f64::from(chain.on)) as u32,
            };
            if draw(doubts, neuron) < named {
                hand_out(neuron as u32);
            }
            rank += self.stride;
            if rank >= self.chains.len() {
                rank -= self.chains.len();
            }
        }
        true
    }
}

/// The chains of a layer, by rank.
fn chains(neuron_count: usize, figures: &TraceFigures) -> Arc<[Chain]> {
    let law = Law::fit(figures);
    shares(neuron_count, law.exponent, figures.selected)
        .into_iter()
        .map(|share| Chain {
            on: units(share),
            turn_on: units(share * (1.0 - law.persistence)),
            turn_off: units((1.0 - share) * (1.0 - law.persistence)),
        })
        .collect()
}

impl Chain {
    /// Share of tokens that it is on for, where it is off: `on (1 - on)`, in units.
    fn off_weight(self) -> f64 {
        f64::from(self.on) * (1.0 - f64::from(self.on) / 65536.0)
    }

    /// Whether a neuron is on at `place`, given that it was (or not) at the place before.
    fn next(self, place: u64, was_on: bool, draw: u32) -> bool {
        match (place, was_on) {
            (0, _) => draw < self.on,
            (_, true) => draw >= self.turn_off,
            (_, false) => draw < self.turn_on,
        }
    }
}

/// The 16 bits for `neuron` of a hash that four neighbours share.
fn draw(draws: u64, neuron: usize) -> u32 {
    (draws >> (16 * (neuron % 4)) & 0xffff) as u32
}

impl Law {
    /// The law whose union is that of `figures` and whose fresh share comes nearest.
    fn fit(figures: &TraceFigures) -> Self {
        let candidates = (0..EXPONENTS).map(|step| {
            let exponent = step as f64 * EXPONENT_STEP;
            let shares = shares(FIT_POINTS, exponent, figures.selected);
            let persistence = persistence_for(&shares, figures);
            let window = figures.window_tokens;
            let fresh =
                union(&shares, persistence, window + 1) - union(&shares, persistence, window);
            let missed = (union(&shares, persistence, window) - figures.union).abs();
            let law = Self {
                exponent,
                persistence,
            };
            (missed + (fresh - figures.fresh).abs(), law)
        });
        let best = candidates.min_by(|a, b| a.0.total_cmp(&b.0));
        best.expect("there are exponents").1
    }
}

/// The persistence at which the union of the window is that of `figures`, or comes nearest: more of it, less union.
fn persistence_for(shares: &[f64], figures: &TraceFigures) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        if union(shares, middle, figures.window_tokens) > figures.union {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low + high) / 2.0
}

/// Expected share of neurons that are on for at least one of `tokens` consecutive tokens.
fn union(shares: &[f64], persistence: f64, tokens: usize) -> f64 {
    let never_on =
        |share: &f64| (1.0 - share) * (1.0 - share * (1.0 - persistence)).powi(tokens as i32 - 1);
    1.0 - shares.iter().map(never_on).sum::<f64>() / shares.len().max(1) as f64
}

/// A Zipf law over `count` ranks, none above 1, whose mean is `selected`.
fn shares(count: usize, exponent: f64, selected: f64) -> Vec<f64> {
    let scaled = |scale: f64| {
        (0..count).map(move |rank| {
            // The middle of the rank's piece of a layer of 2^14 neurons: the law does not depend on `count`.
            let place = (rank as f64 + 0.5) / count as f64 * 16384.0;
            (scale * place.powf(-exponent)).min(1.0)
        })
    };
    let mean = |scale: f64| scaled(scale).sum::<f64>() / count.max(1) as f64;
    let (mut low, mut high) = (0.0, 16384f64.powf(exponent));
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if mean(middle) < selected {
            low = middle;
        } else {
            high = middle;
        }
    }
    scaled(high).collect()
}

fn units(probability: f64) -> u32 {
    (probability * 65536.0).round() as u32
}

/// A step through all of `count` ranks that visits each once.
fn coprime_stride(count: usize, random: u64) -> usize {
    let mut stride = (random % count.max(1) as u64) as usize | 1;
    while gcd(stride, count) != 1 {
        stride += 2;
    }
    stride % count.max(1)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

/// splitmix64's mixing of a seed and a counter.
fn hash(seed: u64, counter: u64) -> u64 {
    let mut z = seed.wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const NEURONS: usize = 16384;

    /// OPT-6.7B in "LLM in a flash".
    const OPT: TraceFigures = TraceFigures {
        selected: 0.10,
        window_tokens: 5,
        union: 0.24,
        fresh: 0.024,
    };

    fn replay() -> Replay {
        ActivityTrace::new(NEURONS, &OPT, 7)
            .replay(3, NEURONS)
            .unwrap()
    }

    /// The neurons of each of `count` tokens, computed `together` at a time.
    fn tokens(replay: &mut Replay, count: usize, together: usize) -> Vec<Vec<u32>> {
        let mut sets = vec![Vec::new(); count];
        for start in (0..count).step_by(together) {
            replay.advance(together.min(count - start), |neuron, wanted_by| {
                for token in (0..together).filter(|token| wanted_by >> token & 1 == 1) {
                    sets[start + token].push(neuron);
                }
            });
        }
        sets
    }

    #[test]
    fn a_long_trace_has_the_papers_figures() {
        let sets = tokens(&mut replay(), 120, 1);
        let share = |count: usize| count as f64 / NEURONS as f64;
        let (mut selected, mut unions, mut fresh, mut windows) = (0.0, 0.0, 0.0, 0.0);
        for window in sets.windows(6) {
            let mut seen = vec![false; NEURONS];
            window[..5]
                .iter()
                .flatten()
                .for_each(|neuron| seen[*neuron as usize] = true);
            unions += share(seen.iter().filter(|seen| **seen).count());
            fresh += share(window[5].iter().filter(|id| !seen[**id as usize]).count());
            selected += share(window[5].len());
            windows += 1.0;
        }
        let figures = [selected / windows, unions / windows, fresh / windows];
        // Chains of two states cannot have fewer new neurons at that union: 2.5 % and not 2.4.
        for (got, wanted) in figures.into_iter().zip([0.10, 0.24, 0.025]) {
            assert!((got / wanted - 1.0).abs() < 0.03, "{figures:?}");
        }
    }

    #[test]
    fn tokens_do_not_depend_on_their_grouping() {
        let one_by_one = tokens(&mut replay(), 40, 1);
        assert_eq!(one_by_one, tokens(&mut replay(), 40, 16));
        assert!(one_by_one.iter().all(|set| set.is_sorted()));
    }

    #[test]
    fn guesses_name_their_share_and_a_wrong_one_for_each_they_miss() {
        let trace = ActivityTrace::new(NEURONS, &OPT, 7).with_guesses(0.8);
        let mut replay = trace.replay(3, NEURONS).unwrap();
        tokens(&mut replay, 10, 1);
        let mut guess = Vec::new();
        assert!(replay.guess(|neuron| guess.push(neuron)));
        let truth = tokens(&mut replay, 1, 1).remove(0);
        let right = guess
            .iter()
            .filter(|id| truth.binary_search(id).is_ok())
            .count();
        let share = |count: usize| count as f64 / truth.len() as f64;
        assert!((share(right) - 0.8).abs() < 0.04, "{}", share(right));
        assert!((share(guess.len() - right) - 0.2).abs() < 0.04);
        // Wrong ones are popular: many were on not long ago, as in a real model.
        let wrong: Vec<_> = guess
            .iter()
            .filter(|id| truth.binary_search(id).is_err())
            .collect();
        let mut replay = trace.replay(3, NEURONS).unwrap();
        let seen: BTreeSet<u32> = tokens(&mut replay, 10, 1).into_iter().flatten().collect();
        let known = wrong.iter().filter(|id| seen.contains(id)).count();
        assert!(
            known as f64 > 0.4 * wrong.len() as f64,
            "{known} of {}",
            wrong.len()
        );
        assert!(!self::replay().guess(|_| {}));
    }

    #[test]
    fn layers_differ_and_other_widths_are_refused() {
        let trace = ActivityTrace::new(96, &OPT, 7);
        let [mut first, mut second] = [0, 1].map(|index| trace.replay(index, 96).unwrap());
        assert_ne!(tokens(&mut first, 8, 1), tokens(&mut second, 8, 1));
        assert!(trace.replay(0, 97).is_err());
    }

    #[test]
    fn a_trace_by_layer_has_the_figures_of_each() {
        let busier = TraceFigures {
            selected: 0.3,
            union: 0.6,
            fresh: 0.08,
            ..OPT
        };
        let trace = ActivityTrace::by_layer(NEURONS, &[OPT, busier], 7);
        let selected = |index: usize| {
            let sets = tokens(&mut trace.replay(index, NEURONS).unwrap(), 40, 1);
            sets.iter().map(Vec::len).sum::<usize>() as f64 / (40 * NEURONS) as f64
        };
        assert!((selected(0) / 0.1 - 1.0).abs() < 0.05, "{}", selected(0));
        assert!((selected(1) / 0.3 - 1.0).abs() < 0.05, "{}", selected(1));
        assert!(trace.replay(2, NEURONS).is_err());
    }
}
