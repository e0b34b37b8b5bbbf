//! The promises about bits: order of operations, grouping, tokens, threads, instruction sets.

use proptest::prelude::*;
use rayon::ThreadPoolBuilder;

use super::naive::{assert_bits, dot_in_order, encode, random, read, Matrix};
use super::{lanes, tables, DTYPES};
use crate::kernels::Kernels;
use crate::{axpy, dot, dot_rows, widen, Accumulator, WeightDtype};

/// Token counts around the kernels' group and block sizes.
const TOKENS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 33, 128];

/// What `dot_rows` must give with vectors of so many lanes.
fn dots_in_order(lanes: usize, m: &Matrix, x: &[f32], tokens: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for r in 0..m.rows {
        let row: Vec<f32> = (0..m.width).map(|i| m.at(r, i)).collect();
        let inputs = (0..tokens).map(|t| &x[t * m.width..(t + 1) * m.width]);
        out.extend(inputs.map(|x| dot_in_order(lanes, &row, x)));
    }
    out
}

/// What `add_rows` must give, starting from zero.
fn sums_in_order(m: &Matrix, c: &[f32], tokens: usize) -> Vec<f32> {
    let mut out = vec![0f32; tokens * m.width];
    for r in 0..m.rows {
        for t in 0..tokens {
            for i in 0..m.width {
                let sum = &mut out[t * m.width + i];
                *sum = c[r * tokens + t].mul_add(m.at(r, i), *sum);
            }
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dots_follow_the_order(
        dtype in 0usize..4,
        rows in 0usize..60,
        k in 0usize..800,
        tokens in 0usize..12,
        seed: u64,
    ) {
        let m = Matrix::random(DTYPES[dtype], rows, k, seed);
        let x = random(tokens * k, seed ^ 1);
        for kernels in tables() {
            let want = dots_in_order(lanes(kernels), &m, &x, tokens);
            assert_bits(&m.dot(kernels, &x, tokens), &want, kernels.name);
        }
    }

    #[test]
    fn sums_follow_the_order(
        dtype in 0usize..4,
        rows in 0usize..80,
        width in 0usize..400,
        tokens in 0usize..12,
        seed: u64,
    ) {
        let m = Matrix::random(DTYPES[dtype], rows, width, seed);
        let c = random(rows * tokens, seed ^ 1);
        let want = sums_in_order(&m, &c, tokens);
        for kernels in tables() {
            assert_bits(&m.add_all(kernels, tokens, &c), &want, kernels.name);
        }
    }

    #[test]
    fn splitting_calls_changes_nothing(
        dtype in 0usize..4,
        rows in 1usize..80,
        cut in 0usize..80,
        tokens in 1usize..9,
        seed: u64,
    ) {
        let (k, cut) = (131, cut.min(rows));
        let m = Matrix::random(DTYPES[dtype], rows, k, seed);
        let x = random(tokens * k, seed ^ 1);
        let c = random(rows * tokens, seed ^ 2);
        for kernels in tables() {
            let whole = m.dot(kernels, &x, tokens);
            let parts = [0..cut, cut..rows].map(|part| m.dot_part(kernels, part, &x, tokens));
            assert_bits(&parts.concat(), &whole, "dots in two calls");

            let mut sums = Accumulator::new();
            sums.reset(tokens, k);
            m.add(kernels, 0..cut, &c[..cut * tokens], &mut sums);
            m.add(kernels, cut..rows, &c[cut * tokens..], &mut sums);
            let whole = m.add_all(kernels, tokens, &c);
            assert_bits(&read(&sums, tokens * k), &whole, "sums in two calls");
        }
    }

    #[test]
    fn plain_slices_follow_the_order(
        len in 0usize..300,
        alpha in -2f32..2.0,
        seed: u64,
    ) {
        let (a, b) = (random(len, seed), random(len, seed ^ 1));
        let mut y = b.clone();
        axpy(alpha, &a, &mut y);
        let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| alpha.mul_add(*a, *b)).collect();
        assert_bits(&y, &sums, "axpy");
        let want = dot_in_order(lanes(Kernels::detect()), &a, &b);
        assert_bits(&[dot(&a, &b)], &[want], "dot in use");
        for kernels in tables() {
            // SAFETY: `tables` lists what this CPU can run.
            let got = unsafe { (kernels.dot)(&a, &b) };
            assert_bits(&[got], &[dot_in_order(lanes(kernels), &a, &b)], "dot");
            let mut y = b.clone();
            // SAFETY: as above.
            unsafe { (kernels.axpy)(alpha, &a, &mut y) };
            assert_bits(&y, &sums, kernels.name);
        }
    }
}

#[test]
fn many_tokens_equal_one_at_a_time() {
    for dtype in DTYPES {
        // More than one panel, span, row block and tile, with leftovers everywhere.
        let (rows, k) = (53, 1029);
        let m = Matrix::random(dtype, rows, k, 5);
        for tokens in TOKENS {
            let x = random(tokens * k, 6);
            let c = random(rows * tokens, 7);
            for kernels in tables() {
                let dots = m.dot(kernels, &x, tokens);
                let sums = m.add_all(kernels, tokens, &c);
                for t in 0..tokens {
                    let of_token: Vec<f32> = (0..rows).map(|r| dots[r * tokens + t]).collect();
                    let alone = m.dot(kernels, &x[t * k..(t + 1) * k], 1);
                    assert_bits(&of_token, &alone, "dots of one token");
                    let c: Vec<f32> = (0..rows).map(|r| c[r * tokens + t]).collect();
                    let alone = m.add_all(kernels, 1, &c);
                    assert_bits(&sums[t * k..(t + 1) * k], &alone, "sums of one token");
                }
            }
        }
    }
}

#[test]
fn threads_change_nothing() {
    let (rows, k) = (211, 1013);
    let pools = [1, 2, 5].map(|n| ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    for dtype in DTYPES {
        let m = Matrix::random(dtype, rows, k, 8);
        for tokens in [1, 3, 21] {
            let x = random(tokens * k, 9);
            let c = random(rows * tokens, 10);
            let dots = dots_in_order(lanes(Kernels::detect()), &m, &x, tokens);
            let sums = sums_in_order(&m, &c, tokens);
            for pool in &pools {
                let mut out = vec![7.0; rows * tokens];
                let mut added = Accumulator::new();
                added.reset(tokens, k);
                pool.install(|| {
                    dot_rows(dtype, rows, |r| m.row(r), &x, tokens, &mut out);
                    added.add_rows(dtype, rows, |r| m.row(r), &c);
                });
                let what = format!("{} threads", pool.current_num_threads());
                assert_bits(&out, &dots, &what);
                assert_bits(&read(&added, tokens * k), &sums, &what);
            }
        }
    }
}

#[test]
fn every_half_is_widened_exactly() {
    for dtype in [WeightDtype::F16, WeightDtype::Bf16] {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let want: Vec<f32> = (0..=u16::MAX)
            .map(|bits| match dtype {
                WeightDtype::F16 => half::f16::from_bits(bits).to_f32_const(),
                _ => f32::from_bits(u32::from(bits) << 16),
            })
            .collect();
        for kernels in tables() {
            // Lengths that end in a whole vector, and in single elements.
            for skip in 0..9 {
                let mut out = vec![7.0; want.len() - skip];
                let widen = kernels.of(dtype).widen;
                // SAFETY: `tables` lists what this CPU can run.
                unsafe { widen(&bytes[2 * skip..], &mut out) };
                assert_bits(&out, &want[skip..], dtype.name());
            }
        }
    }
    let mut out = [0f32; 2];
    widen(WeightDtype::F32, &[0, 0, 128, 63, 0, 0, 0, 192], &mut out);
    assert_eq!(out, [1.0, -2.0]);
}

#[test]
fn infinities_and_nans_pass_through() {
    let special = [
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -0.0,
        0.0,
        1e-7,
        60000.0,
    ];
    let pick = |count: usize, step: usize| -> Vec<f32> {
        (0..count)
            .map(|i| special[i * step % special.len()])
            .collect()
    };
    for dtype in DTYPES {
        let (rows, k) = (11, 37);
        let m = Matrix::of(dtype, k, &pick(rows * k, 5), rows);
        for tokens in [1, 6] {
            let (x, c) = (pick(tokens * k, 3), pick(rows * tokens, 3));
            let sums = sums_in_order(&m, &c, tokens);
            for kernels in tables() {
                let dots = dots_in_order(lanes(kernels), &m, &x, tokens);
                assert_bits(&m.dot(kernels, &x, tokens), &dots, kernels.name);
                assert_bits(&m.add_all(kernels, tokens, &c), &sums, kernels.name);
            }
        }
    }
}

#[test]
fn nothing_to_do_is_no_trouble() {
    let no_row = |_: usize| -> &[u8] { unreachable!("there are no rows") };
    dot_rows(WeightDtype::F16, 0, no_row, &[1.0; 6], 2, &mut []);
    dot_rows(WeightDtype::F16, 3, no_row, &[], 0, &mut []);
    let mut out = [7.0; 2];
    dot_rows(WeightDtype::F16, 2, |_| &[], &[], 1, &mut out);
    assert_eq!(out, [0.0; 2]);
    let mut sums = Accumulator::new();
    sums.write_to(&mut []);
    for (tokens, width) in [(0, 5), (5, 0), (0, 0)] {
        sums.reset(tokens, width);
        sums.add_rows(WeightDtype::F16, 0, no_row, &[]);
        sums.write_to(&mut []);
    }
    sums.reset(2, 1);
    sums.add_rows(WeightDtype::F16, 0, no_row, &[]);
    assert_eq!(read(&sums, 2), [0.0; 2]);
    let one = encode(WeightDtype::F16, 1.0);
    sums.add_rows(WeightDtype::F16, 1, |_| &one, &[3.0, 4.0]);
    assert_eq!(read(&sums, 2), [3.0, 4.0]);
    sums.reset(1, 2);
    assert_eq!(read(&sums, 2), [0.0; 2], "reset clears what was there");
}

#[test]
#[should_panic(expected = "row 1 has 7 bytes, 4 weights of f16 need 8")]
fn a_short_row_panics_in_a_dot() {
    let bytes = [0u8; 8];
    let row = |r: usize| &bytes[..8 - r];
    dot_rows(WeightDtype::F16, 2, row, &[0.0; 4], 1, &mut [0.0; 2]);
}

#[test]
#[should_panic(expected = "row 0 has 15 bytes, 4 weights of f32 need 16")]
fn a_short_row_panics_in_a_sum() {
    let mut sums = Accumulator::new();
    sums.reset(1, 4);
    sums.add_rows(WeightDtype::F32, 1, |_| &[0u8; 15], &[1.0]);
}
