//! Results against sums in `f64`, within the error bound of an `f32` chain.

use proptest::prelude::*;

use super::naive::{random, Matrix};
use super::{tables, DTYPES};

/// Asserts `got` is `sum` within what `steps` roundings of terms adding up to `magnitude` explain.
fn assert_close(got: f32, sum: f64, magnitude: f64, steps: usize) {
    let bound = (steps + 4) as f64 * f64::from(f32::EPSILON) * magnitude;
    let error = (f64::from(got) - sum).abs();
    assert!(error <= bound, "{got} is not {sum}: {error:e} > {bound:e}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dots(
        dtype in 0usize..4,
        rows in 0usize..40,
        k in 0usize..600,
        tokens in 0usize..40,
        seed: u64,
    ) {
        let m = Matrix::random(DTYPES[dtype], rows, k, seed);
        let x = random(tokens * k, seed ^ 1);
        for kernels in tables() {
            let out = m.dot(kernels, &x, tokens);
            for r in 0..rows {
                for t in 0..tokens {
                    let terms = (0..k).map(|i| f64::from(m.at(r, i)) * f64::from(x[t * k + i]));
                    let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, a), p| (s + p, a + p.abs()));
                    assert_close(out[r * tokens + t], sum, magnitude, k / 8 + 8);
                }
            }
        }
    }

    #[test]
    fn sums(
        dtype in 0usize..4,
        rows in 0usize..70,
        width in 0usize..300,
        tokens in 0usize..12,
        seed: u64,
    ) {
        let m = Matrix::random(DTYPES[dtype], rows, width, seed);
        let c = random(rows * tokens, seed ^ 1);
        for kernels in tables() {
            let out = m.add_all(kernels, tokens, &c);
            for t in 0..tokens {
                for i in 0..width {
                    let term = |r: usize| f64::from(c[r * tokens + t]) * f64::from(m.at(r, i));
                    let terms = (0..rows).map(term);
                    let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, a), p| (s + p, a + p.abs()));
                    assert_close(out[t * width + i], sum, magnitude, rows);
                }
            }
        }
    }
}
