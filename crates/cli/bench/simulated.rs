//! A device that is not there: the phone of the DIP paper, by counts alone, so that ours can be set beside the published ones.
//!
//! Weights that were read count as flash traffic, all others that products went through, keys and values among them, as DRAM
//! traffic. Computing takes no time.

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
    /// Of the bytes that one token read and touched.
    pub(crate) fn of(figures: &TokenFigures) -> Self {
        let flash = figures.bytes_read / FLASH_RATE;
        let dram = (figures.touched_bytes - figures.bytes_read).max(0.0) / DRAM_RATE;
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
    fn what_is_read_comes_from_flash_and_the_rest_from_dram() {
        let of = |bytes_read, touched_bytes| {
            SimulatedMs::of(&TokenFigures {
                bytes_read,
                touched_bytes,
                ..TokenFigures::default()
            })
        };
        let both = of(2e7, 1.4e9);
        assert!((both.sum - 43.0).abs() < 1e-9 && (both.max - 23.0).abs() < 1e-9);
        // Reading more than is needed is no DRAM traffic.
        let wasteful = of(3e7, 1e7);
        assert_eq!((wasteful.max, wasteful.sum), (30.0, 30.0));
    }
}
