//! Random elements: a function of a key and a place, so that any window of a tensor can be made in any order.
//!
//! Four elements share a word of 64 hashed bits (the finaliser of splitmix64 over a counter), 16 bits each: as many
//! steps as f16 and bf16 can tell apart, and a few instructions an element.
//!
//! Not here: which distribution a tensor of a model has (`synthetic`).

use std::ops::Range;

use wick_format::{Dtype, FileHasher};

use crate::transcode::narrow;

/// Elements of one hashed word.
const LANES: usize = 4;

/// Elements made at a time, whole words.
const PIECE: usize = 256;

/// The elements of a tensor: uniform within `radius` of `center`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random {
    key: u64,
    center: f32,
    radius: f32,
}

impl Random {
    /// The same value everywhere.
    pub(crate) fn constant(value: f32) -> Self {
        Self {
            key: 0,
            center: value,
            radius: 0.0,
        }
    }

    /// Values around zero with this standard deviation; seed and tensor name say which.
    pub(crate) fn uniform(seed: u64, name: &str, deviation: f32) -> Self {
        let mut hasher = FileHasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        Self {
            key: u64::from_str_radix(&hasher.hex(), 16).expect("a hash is 16 hex digits"),
            center: 0.0,
            radius: deviation * 3f32.sqrt(),
        }
    }

    /// The elements `span` as `to` into `target`; the error is a value that does not fit.
    pub(crate) fn read(&self, span: Range<usize>, to: Dtype, target: &mut [u8]) -> Result<(), f32> {
        let mut values = [0f32; PIECE];
        let (mut start, mut rest) = (span.start, target);
        while start < span.end {
            let first = start / PIECE * PIECE;
            let end = span.end.min(first + PIECE);
            let words = start / LANES..end.div_ceil(LANES);
            let place = words.start * LANES - first..words.end * LANES - first;
            self.fill(words, &mut values[place]);
            let (piece, behind) = rest.split_at_mut((end - start) * to.size_bytes());
            narrow(to, &values[start - first..end - first], piece)?;
            (rest, start) = (behind, end);
        }
        Ok(())
    }

    /// The elements of whole words.
    fn fill(&self, words: Range<usize>, values: &mut [f32]) {
        let step = self.radius / 32768.0;
        for (word, values) in words.zip(values.as_chunks_mut::<LANES>().0) {
            let bits = hash(self.key, word as u64);
            for (lane, value) in values.iter_mut().enumerate() {
                // Half a step aside: as many values below the centre as above.
                let signed = f32::from((bits >> (16 * lane)) as i16) + 0.5;
                *value = self.center + step * signed;
            }
        }
    }
}

/// 64 bits that differ in about half of their places for every key and counter.
fn hash(key: u64, counter: u64) -> u64 {
    let mut bits = key.wrapping_add(counter.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(random: &Random, span: Range<usize>) -> Vec<f32> {
        let mut bytes = vec![0; span.len() * 4];
        random.read(span, Dtype::F32, &mut bytes).unwrap();
        let (values, _) = bytes.as_chunks::<4>();
        values
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    }

    #[test]
    fn any_window_is_a_part_of_the_whole() {
        let random = Random::uniform(1, "a", 2.0);
        let whole = values(&random, 0..1500);
        for span in [0..1, 1..7, 255..257, 3..3, 250..1027, 1499..1500] {
            assert_eq!(values(&random, span.clone()), whole[span]);
        }
    }

    #[test]
    fn every_dtype_is_the_same_value_rounded() {
        let random = Random::uniform(9, "b", 0.02);
        let exact = values(&random, 5..600);
        for to in [Dtype::F16, Dtype::Bf16] {
            let mut expected = vec![0; exact.len() * 2];
            narrow(to, &exact, &mut expected).unwrap();
            let mut got = vec![0; exact.len() * 2];
            random.read(5..600, to, &mut got).unwrap();
            assert_eq!(got, expected, "{to}");
        }
    }

    #[test]
    fn mean_and_deviation_are_as_asked_and_neighbours_do_not_know_each_other() {
        let count = 1 << 18;
        let all = values(&Random::uniform(3, "c", 0.5), 0..count);
        let mean = |values: &mut dyn Iterator<Item = f32>| {
            values.map(f64::from).sum::<f64>() / count as f64
        };
        assert!(mean(&mut all.iter().copied()).abs() < 0.005);
        assert!((mean(&mut all.iter().map(|v| v * v)) - 0.25).abs() < 0.003);
        for distance in [1, 2, 4, 64, 4096] {
            let pairs = all.iter().zip(&all[distance..]);
            assert!(
                mean(&mut pairs.map(|(a, b)| a * b)).abs() < 0.003,
                "{distance}"
            );
        }
        let other = values(&Random::uniform(4, "c", 0.5), 0..64);
        assert!(other.iter().zip(&all).all(|(a, b)| a != b));
        assert_eq!(values(&Random::constant(-0.43), 7..9), [-0.43; 2]);
    }
}
