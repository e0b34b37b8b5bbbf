//! A device that is not there: the phone of the DIP paper, by its rates and our counts.
//!
//! The paper's own figures are of weights in 4 bits, of keys and values at a mean position, and of memory shared out evenly.
//!
//! Weights that were missing count as flash traffic, all others that products went through, keys and values among them, as DRAM
//! traffic: neither padding nor what is read beside them counts. Computing takes no time.

use serde::Serialize;

use crate::pass::TokenFigures;

/// Bytes a second.
const DRAM_RATE: f64 = 60e9;
const FLASH_RATE: f64 = 1e9;

/// What a token would take there.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct SimulatedMs {
    /// Both kinds of traffic at once.
    pub(crate) max: f64,
    /// One after the other.
    pub(crate) sum: f64,
}

impl SimulatedMs {
    /// Of the bytes that one token missed and touched.
    pub(crate) fn of(figures: &TokenFigures) -> Self {
        let flash = figures.missed_bytes / FLASH_RATE;
        let dram = (figures.touched_bytes - figures.missed_bytes) / DRAM_RATE;
        Self {
            max: 1000.0 * flash.max(dram),
            sum: 1000.0 * (flash + dram),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missed_comes_from_flash_and_the_rest_from_dram() {
        let both = SimulatedMs::of(&TokenFigures {
            missed_bytes: 2e7,
            bytes_read: 5e7,
            touched_bytes: 1.4e9 + 2e7,
            ..TokenFigures::default()
        });
        assert!((both.max - 1400.0 / 60.0).abs() < 1e-9, "{both:?}");
        assert!((both.sum - 20.0 - both.max).abs() < 1e-9, "{both:?}");
    }
}
