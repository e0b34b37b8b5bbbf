//! What a layer's FFN did: counts, bytes and where its time went.

use std::ops::AddAssign;
use std::time::{Duration, Instant};

/// Counters of one layer, or of several added up. Where layers go by columns, which are of two lengths, all that is counted
/// in neurons is counted in weights instead.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FfnStats {
    /// Tokens computed; tokens times layers when layers are added up.
    pub tokens: u64,
    /// Neurons these tokens could have used: tokens times the layer's neurons.
    pub neurons: u64,
    /// Neurons selected, summed over tokens.
    pub selected: u64,
    /// Selected neurons whose coefficient is not zero for some token, summed over steps: those whose down columns are
    /// multiplied.
    pub active: u64,
    /// Selected neurons that lay in a slot, summed over steps.
    pub hits: u64,
    /// Selected neurons that had to be read, summed over steps.
    pub misses: u64,
    /// Neurons read ahead of their step.
    pub ahead_read: u64,
    /// Of them, those that the step then selected: they are among its hits.
    pub ahead_used: u64,
    /// Multiplications of a weight with a value that the tokens need, whatever a selector multiplies in whole among them, but
    /// not predictors.
    pub multiply_adds: u64,
    /// Bytes of the records read for misses, without what was read ahead.
    pub bytes_read: u64,
    /// From handing reads out until they were waited for: the time that the device had for `bytes_read`.
    pub in_flight: Duration,
    /// Waiting for reads, and handing them out.
    pub io: Duration,
    /// Keeping the cache's books.
    pub memory: Duration,
    /// Choosing neurons, and guessing those of the next layer.
    pub select: Duration,
    /// Multiplying.
    pub compute: Duration,
}

impl FfnStats {
    /// Share of selected neurons that lay in a slot; 1 when none was selected.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hits, self.hits + self.misses, 1.0)
    }

    pub(crate) fn add_times(&mut self, clock: &Clock) {
        self.in_flight += clock.in_flight;
        self.io += clock.io;
        self.memory += clock.memory;
        self.select += clock.select;
        self.compute += clock.compute;
    }

    /// Share of the neurons read ahead that were then selected; 0 when none was read.
    pub fn ahead_used_share(&self) -> f64 {
        ratio(self.ahead_used, self.ahead_read, 0.0)
    }

    /// Share of the neurons selected per token.
    pub fn selected_fraction(&self) -> f64 {
        ratio(self.selected, self.neurons, 0.0)
    }
}

/// What a folder's matrices outside the records took: attention, head, predictors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MatrixStats {
    /// Bytes of weights that products went through, from DRAM or flash.
    pub bytes_multiplied: u64,
    /// Bytes of the blocks of streamed matrices that were read.
    pub bytes_streamed: u64,
    /// From the first read of a streamed matrix to the last, with what was multiplied meanwhile.
    pub in_flight: Duration,
    /// Waiting for their reads.
    pub io: Duration,
}

fn ratio(part: u64, whole: u64, of_nothing: f64) -> f64 {
    if whole == 0 {
        of_nothing
    } else {
        part as f64 / whole as f64
    }
}

impl AddAssign for FfnStats {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.neurons += other.neurons;
        self.selected += other.selected;
        self.active += other.active;
        self.hits += other.hits;
        self.misses += other.misses;
        self.ahead_read += other.ahead_read;
        self.ahead_used += other.ahead_used;
        self.multiply_adds += other.multiply_adds;
        self.bytes_read += other.bytes_read;
        self.in_flight += other.in_flight;
        self.io += other.io;
        self.memory += other.memory;
        self.select += other.select;
        self.compute += other.compute;
    }
}

/// Books the time since it was last asked under one of the heads of [`FfnStats`].
pub(crate) struct Clock {
    last: Instant,
    pub(crate) in_flight: Duration,
    pub(crate) io: Duration,
    pub(crate) memory: Duration,
    pub(crate) select: Duration,
    pub(crate) compute: Duration,
}

impl Clock {
    pub(crate) fn start() -> Self {
        let zero = Duration::ZERO;
        Self {
            last: Instant::now(),
            in_flight: zero,
            io: zero,
            memory: zero,
            select: zero,
            compute: zero,
        }
    }

    /// Leaves out what happened since the last call.
    pub(crate) fn resume(&mut self) {
        self.last = Instant::now();
    }

    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let lap = now - self.last;
        self.last = now;
        lap
    }

    pub(crate) fn io(&mut self) {
        let lap = self.lap();
        self.io += lap;
    }

    pub(crate) fn memory(&mut self) {
        let lap = self.lap();
        self.memory += lap;
    }

    pub(crate) fn select(&mut self) {
        let lap = self.lap();
        self.select += lap;
    }

    pub(crate) fn compute(&mut self) {
        let lap = self.lap();
        self.compute += lap;
    }
}
