//! Who is kept: the values of largest magnitude of each token, or, cache-aware, those that are worth their read.
//!
//! Invariants:
//! - Exactly the asked number is kept for each token. Of equal magnitudes that with the lower number comes first, and a NaN
//!   before all others, so that it stays visible.
//! - Without residents the choice depends on the values alone.
//!
//! Not here: how many are kept (`options`).

use crate::neurons::Rows;
use crate::selection::{all_of, Selection};

/// Memory of a choice, reused.
#[derive(Debug, Default)]
pub(crate) struct MaskScratch {
    /// Magnitude, then number, of each value: the larger key is kept.
    keys: Vec<u64>,
    /// For each value, bit `t` when token `t` keeps it.
    kept_by: Vec<u128>,
}

impl MaskScratch {
    /// Bytes that it grows to for `width` values.
    pub(crate) fn bytes(width: usize) -> usize {
        width * (8 + 16)
    }
}

/// Puts the `count` values of largest `weigh(number, magnitude)` of each token of `x` `(tokens, width)` into `selection`.
pub(crate) fn keep_largest(
    x: Rows<'_>,
    width: usize,
    count: usize,
    weigh: impl Fn(usize, f32) -> f32,
    scratch: &mut MaskScratch,
    selection: &mut Selection,
) {
    selection.clear();
    if count >= width {
        (0..width as u32).for_each(|number| selection.push(number, all_of(x.tokens)));
        return;
    }
    let MaskScratch { keys, kept_by } = scratch;
    kept_by.clear();
    kept_by.resize(width, 0);
    for (token, values) in x.values.chunks(width).enumerate() {
        keys.clear();
        keys.extend(values.iter().enumerate().map(|(number, value)| {
            let weight = weigh(number, value.abs());
            // Without a sign, floats are in the order of their bits.
            u64::from(weight.to_bits()) << 32 | u64::from(!(number as u32))
        }));
        keys.select_nth_unstable_by(count, |a, b| b.cmp(a));
        for key in &keys[..count] {
            kept_by[!(*key as u32) as usize] |= 1 << token;
        }
    }
    for (number, kept_by) in kept_by.iter().enumerate() {
        selection.push(number as u32, *kept_by);
    }
}

/// What a magnitude counts for in the choice of `dip-ca`: `gamma` of it where its column would have to be read.
pub(super) fn cache_aware(magnitude: f32, is_resident: bool, gamma: f32) -> f32 {
    match is_resident {
        true => magnitude,
        false => gamma * magnitude,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept(values: &[f32], count: usize, weigh: impl Fn(usize, f32) -> f32) -> Vec<u32> {
        let (mut scratch, mut selection) = (MaskScratch::default(), Selection::default());
        let x = Rows { tokens: 1, values };
        keep_largest(x, values.len(), count, weigh, &mut scratch, &mut selection);
        assert!(selection.wanted_by.iter().all(|tokens| *tokens == 1));
        selection.neurons
    }

    fn magnitude(_: usize, magnitude: f32) -> f32 {
        magnitude
    }

    /// The worked example of dip-ca: columns 1, 3 and 5 are resident, and all weights are 1.
    #[test]
    fn the_published_example() {
        let x = [0.1, 0.5, -0.2, 0.8, -0.9];
        let is_resident = [true, false, true, false, true];
        let sum = |numbers: &[u32]| -> f32 { numbers.iter().map(|n| x[*n as usize]).sum() };
        let misses = |numbers: &[u32]| {
            let missing = numbers.iter().filter(|n| !is_resident[**n as usize]);
            missing.count()
        };
        // Numbers from 1: all five, then 2, 4 and 5, then 3, 4 and 5.
        let all = kept(&x, 5, magnitude);
        assert!((sum(&all) - 0.3).abs() < 1e-6);
        let plain = kept(&x, 3, magnitude);
        assert_eq!((&plain[..], misses(&plain)), (&[1, 3, 4][..], 2));
        assert!((sum(&plain) - 0.4).abs() < 1e-6);
        let aware = kept(&x, 3, |number, magnitude| {
            cache_aware(magnitude, is_resident[number], 0.2)
        });
        assert_eq!((&aware[..], misses(&aware)), (&[2, 3, 4][..], 1));
        assert!((sum(&aware) + 0.3).abs() < 1e-6);
    }

    #[test]
    fn ties_go_to_the_lower_number_and_nan_comes_first() {
        assert_eq!(kept(&[1.0, -1.0, 1.0, -1.0], 2, magnitude), [0, 1]);
        assert_eq!(kept(&[0.0; 4], 3, magnitude), [0, 1, 2]);
        let odd = [1.0, f32::INFINITY, -f32::NAN, 2.0];
        assert_eq!(kept(&odd, 1, magnitude), [2]);
        assert_eq!(kept(&odd, 2, magnitude), [1, 2]);
    }

    #[test]
    fn tokens_choose_for_themselves() {
        let values = [3.0, 1.0, 2.0, 0.5, 4.0, -5.0];
        let x = Rows {
            tokens: 2,
            values: &values,
        };
        let (mut scratch, mut selection) = (MaskScratch::default(), Selection::default());
        keep_largest(x, 3, 1, magnitude, &mut scratch, &mut selection);
        assert_eq!(selection.neurons, [0, 2]);
        assert_eq!(selection.wanted_by, [1, 2]);
        keep_largest(x, 3, 3, magnitude, &mut scratch, &mut selection);
        assert_eq!(selection.wanted_by, [3; 3]);
    }

    proptest! {
        #[test]
        fn as_a_sort_would_have_it(values in prop::collection::vec(-4i8..4, 1..60), part in 0.0..1.0f64) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let count = ((part * values.len() as f64) as usize).max(1);
            let mut sorted: Vec<u32> = (0..values.len() as u32).collect();
            sorted.sort_by(|a, b| {
                let magnitude = |n: &u32| values[*n as usize].abs();
                magnitude(b).total_cmp(&magnitude(a)).then(a.cmp(b))
            });
            sorted.truncate(count);
            sorted.sort_unstable();
            prop_assert_eq!(kept(&values, count, magnitude), sorted);
        }
    }
}
