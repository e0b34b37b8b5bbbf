//! What a layer's FFN did: counts, bytes and where its time went.

use std::ops::AddAssign;
use std::time::Duration;

/// Counters of one layer, or of several added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FfnStats {
    /// Tokens computed; tokens times layers when layers are added up.
    pub tokens: u64,
    /// Neurons these tokens could have used: tokens times the layer's neurons.
    pub neurons: u64,
    /// Neurons selected, summed over tokens.
    pub selected: u64,
    /// Selected neurons that lay in a slot, summed over steps.
    pub hits: u64,
    /// Selected neurons that had to be read, summed over steps.
    pub misses: u64,
    /// Bytes of the records read for misses.
    pub bytes_read: u64,
    /// Waiting for reads, and handing them out.
    pub io: Duration,
    /// Keeping the cache's books.
    pub memory: Duration,
    /// Selecting and multiplying.
    pub compute: Duration,
}

impl FfnStats {
    /// Share of selected neurons that lay in a slot; 1 when none was selected.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hits, self.hits + self.misses, 1.0)
    }

    /// Share of the neurons selected per token.
    pub fn selected_fraction(&self) -> f64 {
        ratio(self.selected, self.neurons, 0.0)
    }
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
        self.hits += other.hits;
        self.misses += other.misses;
        self.bytes_read += other.bytes_read;
        self.io += other.io;
        self.memory += other.memory;
        self.compute += other.compute;
    }
}
