//! What an order costs: the requests and bytes that a reader makes of tokens' misses.
//!
//! Not here: the reader itself, whose rule this follows (`wick-io`, `plan.rs`): records with a small gap between them share
//! a request, up to a length.

use wick_io::{ReaderOptions, RUN_BYTES_MAX};

use super::OrderCost;

/// What a request costs besides its bytes, in bytes: two requests, and one across a gap of 12 to 16 KiB, took the same
/// time (docs/bench/io.md).
const REQUEST_BYTES: u64 = 14 << 10;

/// Requests and bytes, gaps included, of some tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadCost {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
}

impl ReadCost {
    /// Of reading each of `sets` in records of `stride_bytes`, where `record_of` tells a neuron's record.
    pub(crate) fn of<'a>(
        sets: impl Iterator<Item = &'a [u32]>,
        record_of: impl Fn(u32) -> usize,
        stride_bytes: usize,
    ) -> Self {
        let gap_bytes = ReaderOptions::default().gap_bytes;
        let mut cost = Self::default();
        let mut records = Vec::new();
        for neurons in sets {
            records.clear();
            records.extend(neurons.iter().map(|neuron| record_of(*neuron)));
            records.sort_unstable();
            let mut run: Option<(usize, usize)> = None;
            for &record in &records {
                let (start, end) = (record * stride_bytes, (record + 1) * stride_bytes);
                run = match run {
                    Some((first, last))
                        if start - last <= gap_bytes && end - first <= RUN_BYTES_MAX =>
                    {
                        cost.bytes += (end - last) as u64;
                        Some((first, end))
                    }
                    _ => {
                        cost.requests += 1;
                        cost.bytes += stride_bytes as u64;
                        Some((start, end))
                    }
                };
            }
        }
        cost
    }

    /// The means over so many tokens.
    pub(crate) fn a_token(&self, tokens: usize) -> OrderCost {
        let tokens = tokens.max(1) as f64;
        OrderCost {
            requests: self.requests as f64 / tokens,
            bytes: self.bytes as f64 / tokens,
        }
    }

    /// One figure of it: bytes, and what requests are worth in bytes.
    pub(crate) fn weight(&self) -> u64 {
        self.bytes + self.requests * REQUEST_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_and_those_across_small_gaps_share_requests() {
        let cost = |sets: &[&[u32]], stride: usize| {
            let cost = ReadCost::of(sets.iter().copied(), |neuron| neuron as usize, stride);
            (cost.requests, cost.bytes)
        };
        assert_eq!(cost(&[&[0, 1, 3], &[7]], 8192), (2, 5 * 8192));
        assert_eq!(cost(&[&[0, 3]], 8192), (2, 2 * 8192), "two between");
        let all: Vec<u32> = (0..40).collect();
        assert_eq!(cost(&[&all], 16384), (3, 40 * 16384), "16 a request");
        assert_eq!(cost(&[&[], &[]], 512), (0, 0));
        let reversed = ReadCost::of([&[0u32, 1][..]].into_iter(), |n| 9 - n as usize, 512);
        assert_eq!((reversed.requests, reversed.bytes), (1, 1024));
    }
}
