//! Packed rows: what packing keeps, and products against the obvious version, on every instruction set.

use half::f16;
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;

use super::naive::{assert_bits, dot_in_order, random};
use super::tables;
use crate::packed::{pack_row, packed_groups, PackedBits, PACKED_GROUP};
use crate::packed_dot::PackedRows;

/// Packed rows, and what their weights were.
struct Packed {
    bits: PackedBits,
    width: usize,
    weights: Vec<f32>,
    packed: Vec<u8>,
    scales: Vec<u8>,
}

impl Packed {
    fn random(bits: PackedBits, rows: usize, width: usize, seed: u64) -> Self {
        Self::of(bits, width, random(rows * width, seed))
    }

    fn of(bits: PackedBits, width: usize, weights: Vec<f32>) -> Self {
        let mut made = Self {
            bits,
            width,
            packed: Vec::new(),
            scales: Vec::new(),
            weights,
        };
        let importance = vec![1.0; width];
        for row in made.weights.chunks(width.max(1)) {
            let mut packed = vec![0xaa; bits.row_bytes(width)];
            let mut scales = vec![0xaa; 2 * packed_groups(width)];
            pack_row(bits, row, &importance, &mut packed, &mut scales);
            made.packed.extend(packed);
            made.scales.extend(scales);
        }
        made
    }

    fn rows(&self) -> PackedRows<'_> {
        PackedRows {
            bits: self.bits,
            weights: &self.packed,
            scales: &self.scales,
        }
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        let at = 2 * (row * packed_groups(self.width) + group);
        f16::from_le_bytes([self.scales[at], self.scales[at + 1]]).to_f32()
    }

    /// The level that weight `i` of `row` is stored as, by the words of the layout.
    fn level(&self, row: usize, i: usize) -> f32 {
        let bits = self.bits.count();
        let start = row * self.bits.row_bytes(self.width);
        let (group, i) = (i / PACKED_GROUP, i % PACKED_GROUP);
        let byte = self.packed[start + group * 8 * bits + i % (8 * bits)];
        let code = byte >> (bits * (i / (8 * bits))) & ((1 << bits) - 1);
        f32::from(code) - ((1 << bits) - 1) as f32 / 2.0
    }

    fn value(&self, row: usize, i: usize) -> f32 {
        self.level(row, i) * self.scale(row, i / PACKED_GROUP)
    }

    /// What a dot must be, bit for bit.
    fn dot_in_order(&self, row: usize, x: &[f32]) -> f32 {
        let mut totals = [0f32; 8];
        for group in 0..packed_groups(self.width) {
            let at = |i: usize| group * PACKED_GROUP + i;
            let bytes = 8 * self.bits.count();
            let mut sums = [0f32; 8];
            for byte in (0..bytes).step_by(8) {
                for field in 0..8 / self.bits.count() {
                    for (lane, sum) in sums.iter_mut().enumerate() {
                        let i = at(field * bytes + byte + lane);
                        if i < self.width {
                            *sum = self.level(row, i).mul_add(x[i], *sum);
                        }
                    }
                }
            }
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total = self.scale(row, group).mul_add(sum, *total);
            }
        }
        // The lane tree of any dot.
        dot_in_order(8, &totals, &[1.0; 8])
    }

    fn error(&self) -> f32 {
        let square = |(at, weight): (usize, &f32)| {
            let error = weight - self.value(at / self.width, at % self.width);
            error * error
        };
        self.weights.iter().enumerate().map(square).sum::<f32>() / self.weights.len() as f32
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn products_follow_the_order_on_every_instruction_set(
        bits in 0usize..3,
        rows in 0usize..70,
        width in 1usize..330,
        tokens in 1usize..11,
        seed: u64,
    ) {
        let packed = Packed::random(PackedBits::ALL[bits], rows, width, seed);
        let x = random(tokens * width, seed ^ 1);
        let mut want = Vec::new();
        for row in 0..rows {
            want.extend(x.chunks(width).map(|x| packed.dot_in_order(row, x)));
        }
        for kernels in tables() {
            let mut out = vec![7.0; rows * tokens];
            packed.rows().dot_on(kernels, &x, tokens, &mut out);
            assert_bits(&out, &want, kernels.name);
        }
        for (row, dots) in want.chunks(tokens).enumerate() {
            for (dot, x) in dots.iter().zip(x.chunks(width)) {
                let terms = (0..width).map(|i| f64::from(packed.value(row, i)) * f64::from(x[i]));
                let sum: f64 = terms.sum();
                prop_assert!((f64::from(*dot) - sum).abs() < 1e-4 * (1.0 + sum.abs()));
            }
        }
    }
}

#[test]
fn threads_change_nothing() {
    let (rows, width, tokens) = (403, 200, 3);
    let x = random(tokens * width, 4);
    for bits in PackedBits::ALL {
        let packed = Packed::random(bits, rows, width, 3);
        let outs = [1, 2, 5].map(|threads| {
            let pool = ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            let mut out = vec![7.0; rows * tokens];
            pool.install(|| packed.rows().dot(&x, tokens, &mut out));
            out
        });
        assert_bits(&outs[1], &outs[0], "2 threads");
        assert_bits(&outs[2], &outs[0], "5 threads");
    }
}

#[test]
fn more_bits_keep_more_and_each_about_what_its_levels_can() {
    // Of values that are as likely everywhere in -1..1, levels of any step keep at best a variance of step^2 / 12.
    let [one, two, four] = PackedBits::ALL.map(|bits| Packed::random(bits, 40, 640, 9).error());
    let best = [1.0f32, 0.5, 0.125].map(|step| step * step / 12.0);
    for (error, best) in [one, two, four].into_iter().zip(best) {
        assert!(
            (0.8 * best..1.2 * best).contains(&error),
            "{error} against {best}"
        );
    }
}

#[test]
fn what_lies_on_levels_is_kept_exactly_and_nothing_stays_nothing() {
    for bits in PackedBits::ALL {
        let level_max = ((1 << bits.count()) - 1) as f32 / 2.0;
        let levels = |i: usize| (i % (1 << bits.count())) as f32 - level_max;
        let mut weights: Vec<f32> = (0..100).map(|i| 0.25 * levels(i)).collect();
        let packed = Packed::of(bits, 100, weights.clone());
        for (i, weight) in weights.iter().enumerate() {
            assert_eq!(packed.value(0, i), *weight, "{bits:?} {i}");
        }
        weights.fill(0.0);
        let packed = Packed::of(bits, 100, weights);
        assert!((0..100).all(|i| packed.value(0, i) == 0.0));
    }
}

#[test]
fn importance_says_which_weights_are_kept_best() {
    let weights = random(PACKED_GROUP, 12);
    let error = |importance: &[f32]| {
        let mut packed = vec![0; PackedBits::Two.row_bytes(PACKED_GROUP)];
        let mut scales = vec![0; 2];
        pack_row(
            PackedBits::Two,
            &weights,
            importance,
            &mut packed,
            &mut scales,
        );
        let made = Packed {
            bits: PackedBits::Two,
            width: PACKED_GROUP,
            weights: weights.clone(),
            packed,
            scales,
        };
        let first = |i: usize| (weights[i] - made.value(0, i)).powi(2);
        (0..8).map(first).sum::<f32>()
    };
    let mut importance = vec![1.0; PACKED_GROUP];
    let alike = error(&importance);
    importance[..8].fill(1000.0);
    assert!(error(&importance) < 0.9 * alike);
}

#[test]
fn weights_that_cannot_be_kept_do_no_harm() {
    for bits in PackedBits::ALL {
        for odd in [f32::NAN, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE] {
            let mut weights = random(70, 1);
            weights[3] = odd;
            let packed = Packed::of(bits, 70, weights);
            assert!(!packed.scale(0, 1).is_nan(), "the next group is its own");
        }
    }
}

#[test]
fn nothing_to_do_is_no_trouble() {
    let none = PackedRows {
        bits: PackedBits::Four,
        weights: &[],
        scales: &[],
    };
    none.dot(&[], 0, &mut []);
    none.dot(&[1.0; 6], 2, &mut []);
    let mut out = [7.0; 2];
    none.dot(&[], 1, &mut out);
    assert_eq!(out, [0.0; 2]);
}

#[test]
#[should_panic(expected = "weights of the rows")]
fn too_few_weights_panic() {
    let packed = Packed::random(PackedBits::One, 2, 64, 1);
    packed.rows().dot(&[0.0; 65], 1, &mut [0.0; 2]);
}

#[test]
fn rows_are_whole_groups_and_bits_have_their_count() {
    for (bits, bytes) in PackedBits::ALL.into_iter().zip([8, 16, 32]) {
        assert_eq!(PackedBits::from_count(bits.count()), Some(bits));
        assert_eq!(
            [1, 64, 65].map(|width| bits.row_bytes(width)),
            [bytes, bytes, 2 * bytes]
        );
    }
    assert_eq!([0, 3, 8].map(PackedBits::from_count), [None; 3]);
}
