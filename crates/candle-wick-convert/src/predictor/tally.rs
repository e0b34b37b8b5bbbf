//! What selections were worth, counted token by token against what was truly active.
//!
//! Not here: running the model (`evaluate`).

use std::ops::AddAssign;

use candle_wick::Activation;
use serde::Serialize;

use super::record::TokenOutcome;
use super::threshold::activation_threshold;

/// Bins of a histogram: half octaves, those at the ends hold what lies beyond.
const BINS: usize = 40;
/// The logarithm to base 2 of the least value of the second bin.
const FIRST_OCTAVE: f32 = -12.0;

/// Pre-activations of active neurons, above the activation's threshold: of all, and of those that were not selected.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bin {
    /// The least value, but for the first bin, which goes down to 0; the next bin has the end.
    pub from: f32,
    /// Active neurons, all tokens added up.
    pub active: u64,
    /// Of them, those that were not selected.
    pub missed: u64,
}

/// Counts of a layer, or of several added up.
#[derive(Clone, Debug)]
pub(super) struct Tally {
    /// Neurons of all tokens.
    all: u64,
    active: u64,
    selected: u64,
    found: u64,
    /// Selected now or by one of the window's tokens.
    cached: u64,
    cached_found: u64,
    /// Selected, and by no token of the window before.
    read: u64,
    mass: f64,
    mass_missed: f64,
    cached_mass_missed: f64,
    bins_active: [u64; BINS],
    bins_missed: [u64; BINS],
}

/// Shares of what was counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quality {
    /// Truly active of all neurons.
    pub active: f64,
    /// Selected of all neurons.
    pub selected: f64,
    /// Selected of the truly active: 1 less the false negatives.
    pub recall: f64,
    /// Selected of those that are not active: false positives.
    pub false_positives: f64,
    /// Of the sum of what all neurons' columns are multiplied by, without signs, the part of those that are not selected.
    pub mass_missed: f64,
    /// The share multiplied if every cached neuron were: selected now or by one of the window's tokens.
    pub cached: f64,
    /// The recall of that.
    pub cached_recall: f64,
    /// What that would still miss of the sum.
    pub cached_mass_missed: f64,
    /// Selected of all neurons, and by no token of the window before: read from flash.
    pub read: f64,
}

impl Tally {
    pub(super) fn new() -> Self {
        Self {
            all: 0,
            active: 0,
            selected: 0,
            found: 0,
            cached: 0,
            cached_found: 0,
            read: 0,
            mass: 0.0,
            mass_missed: 0.0,
            cached_mass_missed: 0.0,
            bins_active: [0; BINS],
            bins_missed: [0; BINS],
        }
    }

    /// The counts as shares; of nothing, all is found.
    pub(super) fn quality(&self) -> Quality {
        let share = |part: f64, whole: f64, of_nothing: f64| match whole > 0.0 {
            true => part / whole,
            false => of_nothing,
        };
        let of_all = |part: u64| share(part as f64, self.all as f64, 0.0);
        let of_active = |part: u64| share(part as f64, self.active as f64, 1.0);
        let (false_positives, inactive) = (self.selected - self.found, self.all - self.active);
        Quality {
            active: of_all(self.active),
            selected: of_all(self.selected),
            recall: of_active(self.found),
            false_positives: share(false_positives as f64, inactive as f64, 0.0),
            mass_missed: share(self.mass_missed, self.mass, 0.0),
            cached: of_all(self.cached),
            cached_recall: of_active(self.cached_found),
            cached_mass_missed: share(self.cached_mass_missed, self.mass, 0.0),
            read: of_all(self.read),
        }
    }

    /// From the first bin with an active neuron to the last.
    pub(super) fn histogram(&self) -> Vec<Bin> {
        let bin = |index: usize| Bin {
            from: bin_start(index),
            active: self.bins_active[index],
            missed: self.bins_missed[index],
        };
        let is_used = |index: &usize| self.bins_active[*index] > 0;
        let first = (0..BINS).find(is_used).unwrap_or(0);
        let end = (0..BINS).rfind(is_used).map_or(0, |last| last + 1);
        (first..end).map(bin).collect()
    }
}

fn bin_start(index: usize) -> f32 {
    (FIRST_OCTAVE + (index as f32 - 1.0) / 2.0).exp2()
}

fn bin_of(value: f32) -> usize {
    // A cast saturates, and makes 0 of what is no number.
    let half_octaves = 2.0 * (value.log2() - FIRST_OCTAVE);
    ((half_octaves.floor() + 1.0).max(0.0) as usize).min(BINS - 1)
}

impl AddAssign<&Tally> for Tally {
    fn add_assign(&mut self, other: &Tally) {
        self.all += other.all;
        self.active += other.active;
        self.selected += other.selected;
        self.found += other.found;
        self.cached += other.cached;
        self.cached_found += other.cached_found;
        self.read += other.read;
        self.mass += other.mass;
        self.mass_missed += other.mass_missed;
        self.cached_mass_missed += other.cached_mass_missed;
        for bin in 0..BINS {
            self.bins_active[bin] += other.bins_active[bin];
            self.bins_missed[bin] += other.bins_missed[bin];
        }
    }
}

/// Counts one layer's tokens, which follow each other.
pub(super) struct LayerTally {
    pub(super) tally: Tally,
    window: usize,
    activation: Activation,
    /// Tokens since each neuron was selected last.
    idle: Vec<usize>,
    is_selected: Vec<bool>,
}

impl LayerTally {
    /// Nothing yet, of a layer with `neurons` neurons that all have been idle for ever.
    pub(super) fn new(neurons: usize, window: usize, activation: Activation) -> Self {
        Self {
            tally: Tally::new(),
            window,
            activation,
            idle: vec![usize::MAX; neurons],
            is_selected: vec![false; neurons],
        }
    }

    pub(super) fn push(&mut self, outcome: &TokenOutcome<'_>) {
        self.is_selected.fill(false);
        for &neuron in outcome.selected {
            self.is_selected[neuron as usize] = true;
        }
        let tally = &mut self.tally;
        let threshold = activation_threshold(self.activation);
        for (neuron, idle) in self.idle.iter_mut().enumerate() {
            let is_selected = self.is_selected[neuron];
            let was_cached = *idle < self.window;
            let is_computed = is_selected || was_cached;
            let mass = f64::from(outcome.coefficients[neuron].abs());
            let value = outcome.pre_activations[neuron];
            *idle = if is_selected {
                0
            } else {
                idle.saturating_add(1)
            };
            tally.all += 1;
            tally.selected += u64::from(is_selected);
            tally.cached += u64::from(is_computed);
            tally.read += u64::from(is_selected && !was_cached);
            if !self.activation.is_active(value) {
                continue;
            }
            let bin = bin_of(value - threshold);
            tally.active += 1;
            tally.mass += mass;
            tally.bins_active[bin] += 1;
            if is_selected {
                tally.found += 1;
            } else {
                tally.mass_missed += mass;
                tally.bins_missed[bin] += 1;
            }
            if is_computed {
                tally.cached_found += 1;
            } else {
                tally.cached_mass_missed += mass;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_wick::{CachePolicy, NeuronCache, PASS_NEURONS};

    use super::*;

    #[test]
    fn shares_are_those_of_what_was_counted() {
        let mut layer = LayerTally::new(4, 1, Activation::FatRelu(0.5));
        let tokens: [(&[u32], [f32; 4], [f32; 4]); 2] = [
            (&[0, 3], [1.5, 0.5, 2.5, 0.0], [1.0, 9.0, -2.0, 9.0]),
            (&[1], [0.75, 0.6, 0.1, 0.2], [0.5, 0.5, 9.0, 9.0]),
        ];
        for (selected, pre_activations, coefficients) in &tokens {
            layer.push(&TokenOutcome {
                selected,
                pre_activations,
                coefficients,
            });
        }
        let quality = layer.tally.quality();
        let expected = Quality {
            active: 4.0 / 8.0,
            selected: 3.0 / 8.0,
            recall: 2.0 / 4.0,
            false_positives: 1.0 / 4.0,
            mass_missed: 2.5 / 4.0,
            // The second token has neurons 0 and 3 beside its own.
            cached: 5.0 / 8.0,
            cached_recall: 3.0 / 4.0,
            cached_mass_missed: 2.0 / 4.0,
            read: 3.0 / 8.0,
        };
        assert_eq!(quality, expected);
        let histogram = layer.tally.histogram();
        let of = |active: fn(&Bin) -> u64| histogram.iter().map(active).sum::<u64>();
        assert_eq!((of(|bin| bin.active), of(|bin| bin.missed)), (4, 2));
        let last = histogram.last().unwrap();
        assert_eq!((last.from, last.active, last.missed), (2.0, 1, 1));
        assert_eq!(Tally::new().quality().recall, 1.0);
        assert!(Tally::new().histogram().is_empty());
    }

    #[test]
    fn bins_hold_what_lies_between_their_starts() {
        for index in 1..BINS {
            assert_eq!(bin_of(bin_start(index) * 1.0001), index);
            assert_eq!(bin_of(bin_start(index) * 0.9999), index - 1);
        }
        assert_eq!((bin_of(f32::MIN_POSITIVE), bin_of(f32::NAN)), (0, 0));
        assert_eq!(bin_of(f32::INFINITY), BINS - 1);
    }

    /// What is read is what the program's own cache misses when it drops what no token of the window used.
    #[test]
    fn reads_are_those_of_a_cache_with_such_a_window() {
        let (neurons, window) = (30, 3);
        let mut layer = LayerTally::new(neurons, window, Activation::Relu);
        let mut cache = NeuronCache::new(neurons, neurons, CachePolicy::Lru, Some(window));
        let mut misses = 0;
        for token in 0..200u32 {
            let is_on = |n: &u32| (token * 7 + n * n * 3 + token * n) % 11 < 2;
            let selected: Vec<u32> = (0..neurons as u32).filter(is_on).collect();
            let plan = cache.plan(&selected, PASS_NEURONS);
            misses += plan.miss_count() as u64;
            cache.commit(&selected, plan, 1, |_| 1);
            layer.push(&TokenOutcome {
                selected: &selected,
                pre_activations: &vec![0.0; neurons],
                coefficients: &vec![0.0; neurons],
            });
        }
        assert!(misses > 100);
        assert_eq!(layer.tally.read, misses);
    }
}
