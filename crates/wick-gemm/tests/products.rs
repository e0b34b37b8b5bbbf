//! Products of every shape, stride and element type beside a naive twin.

use gemm::{c32, f16, gemm, Parallelism};
use proptest::prelude::*;

/// A matrix inside a larger piece of memory, walked in any direction.
#[derive(Clone, Debug)]
struct Matrix {
    values: Vec<f64>,
    start: usize,
    row_stride: isize,
    column_stride: isize,
}

impl Matrix {
    /// `(rows, columns)` values with a gap between lines, in row or column order, each direction turned or not.
    fn new(rows: usize, columns: usize, layout: Layout, seed: u64) -> Self {
        let Layout {
            by_column,
            gap,
            turned,
        } = layout;
        let (lines, length) = if by_column {
            (columns, rows)
        } else {
            (rows, columns)
        };
        let line = (length + gap) as isize;
        let (mut row_stride, mut column_stride) = if by_column { (1, line) } else { (line, 1) };
        let mut start = 0;
        for (is_turned, stride, count) in [
            (turned[0], &mut row_stride, rows),
            (turned[1], &mut column_stride, columns),
        ] {
            if is_turned && count > 0 {
                start += *stride * (count as isize - 1);
                *stride = -*stride;
            }
        }
        let mut state = seed;
        let mut value = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            ((state >> 40) as f64 / (1u64 << 24) as f64) - 0.5
        };
        let values = (0..lines * (length + gap) + 1).map(|_| value()).collect();
        Self {
            values,
            start: start as usize,
            row_stride,
            column_stride,
        }
    }

    fn place(&self, row: usize, column: usize) -> usize {
        let offset = row as isize * self.row_stride + column as isize * self.column_stride;
        (self.start as isize + offset) as usize
    }
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    by_column: bool,
    gap: usize,
    turned: [bool; 2],
}

fn layout() -> impl Strategy<Value = Layout> {
    (any::<bool>(), 0..3usize, any::<[bool; 2]>()).prop_map(|(by_column, gap, turned)| Layout {
        by_column,
        gap,
        turned,
    })
}

/// An element type: how it is made of an `f64` and read as one.
trait Element: Copy + 'static {
    const PRECISION: f64;
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
}

impl Element for f32 {
    const PRECISION: f64 = 1e-5;
    fn of(value: f64) -> Self {
        value as f32
    }
    fn value(self) -> f64 {
        self.into()
    }
}

impl Element for f64 {
    const PRECISION: f64 = 1e-12;
    fn of(value: f64) -> Self {
        value
    }
    fn value(self) -> f64 {
        self
    }
}

impl Element for f16 {
    const PRECISION: f64 = 2e-2;
    fn of(value: f64) -> Self {
        f16::from_f64(value)
    }
    fn value(self) -> f64 {
        self.to_f64()
    }
}

type Size = (usize, usize, usize);

/// Compares every element of the product, and that nothing beside it was written.
fn check<T: Element>(
    (m, n, k): Size,
    layouts: [Layout; 3],
    read_dst: bool,
    parallelism: Parallelism,
) -> Result<(), TestCaseError> {
    let [dst, lhs, rhs] = layouts;
    let dst = Matrix::new(m, n, dst, 1);
    let (lhs, rhs) = (Matrix::new(m, k, lhs, 2), Matrix::new(k, n, rhs, 3));
    let typed = |matrix: &Matrix| -> Vec<T> { matrix.values.iter().copied().map(T::of).collect() };
    let (left, right, before) = (typed(&lhs), typed(&rhs), typed(&dst));
    let mut got = before.clone();
    let (alpha, beta) = (0.5, 1.5);
    // SAFETY: matrices inside of vectors.
    unsafe {
        gemm(
            m,
            n,
            k,
            got.as_mut_ptr().add(dst.start),
            dst.column_stride,
            dst.row_stride,
            read_dst,
            left.as_ptr().add(lhs.start),
            lhs.column_stride,
            lhs.row_stride,
            right.as_ptr().add(rhs.start),
            rhs.column_stride,
            rhs.row_stride,
            T::of(alpha),
            T::of(beta),
            false,
            false,
            false,
            parallelism,
        );
    }
    let mut expected: Vec<f64> = before.iter().map(|value| value.value()).collect();
    for row in 0..m {
        for column in 0..n {
            let products = (0..k).map(|depth| {
                left[lhs.place(row, depth)].value() * right[rhs.place(depth, column)].value()
            });
            let at = &mut expected[dst.place(row, column)];
            let kept = if read_dst { alpha * *at } else { 0.0 };
            *at = kept + beta * products.sum::<f64>();
        }
    }
    let most = T::PRECISION * (1.0 + k as f64).sqrt();
    for (got, expected) in got.iter().zip(&expected) {
        prop_assert!((got.value() - expected).abs() <= most);
    }
    Ok(())
}

proptest! {
    #[test]
    fn products_are_those_of_the_naive_twin(
        size in (0..40usize, 0..40usize, 0..70usize),
        layouts in [layout(), layout(), layout()],
        read_dst in any::<bool>(),
        is_parallel in any::<bool>(),
    ) {
        let parallelism = if is_parallel { Parallelism::Rayon(0) } else { Parallelism::None };
        check::<f32>(size, layouts, read_dst, parallelism)?;
        check::<f64>(size, layouts, read_dst, parallelism)?;
        check::<f16>(size, layouts, read_dst, parallelism)?;
    }
}

#[test]
fn large_products_go_to_several_threads() {
    let plain = Layout {
        by_column: false,
        gap: 0,
        turned: [false; 2],
    };
    let turned = Layout {
        by_column: true,
        ..plain
    };
    for size in [(1, 1024, 1024), (64, 300, 2048), (300, 64, 17)] {
        check::<f32>(size, [plain, plain, turned], false, Parallelism::Rayon(0)).unwrap();
        check::<f16>(size, [plain, plain, turned], false, Parallelism::Rayon(0)).unwrap();
    }
}

/// `conj` of a complex number, if asked for.
fn conjugated(value: c32, is_conjugated: bool) -> c32 {
    match is_conjugated {
        true => value.conj(),
        false => value,
    }
}

proptest! {
    /// Also where the product is turned around for the kernel, and what was on the left is on the right.
    #[test]
    fn complex_products_are_those_of_the_naive_twin(
        (m, n, k) in (1..12usize, 1..12usize, 0..12usize),
        by_column in any::<bool>(),
        conj in any::<[bool; 3]>(),
        read_dst in any::<bool>(),
    ) {
        let numbers = |count: usize, seed: usize| -> Vec<c32> {
            let value = |at: usize| ((at * 37 + seed) % 19) as f32 / 19.0 - 0.5;
            (0..count).map(|at| c32::new(value(at), value(at + 7))).collect()
        };
        let (left, right, before) = (numbers(m * k, 1), numbers(k * n, 2), numbers(m * n, 3));
        let (alpha, beta) = (c32::new(0.5, 0.25), c32::new(1.5, -0.5));
        let (column_stride, row_stride) = if by_column { (m, 1) } else { (1, n) };
        let mut got = before.clone();
        // SAFETY: matrices of these sizes.
        unsafe {
            gemm(
                m, n, k, got.as_mut_ptr(), column_stride as isize, row_stride as isize, read_dst, left.as_ptr(), 1, k as isize,
                right.as_ptr(), 1, n as isize, alpha, beta, conj[0], conj[1], conj[2], Parallelism::None,
            );
        }
        for row in 0..m {
            for column in 0..n {
                let at = row * row_stride + column * column_stride;
                let products = (0..k).map(|depth| {
                    conjugated(left[row * k + depth], conj[1]) * conjugated(right[depth * n + column], conj[2])
                });
                let kept = if read_dst { alpha * conjugated(before[at], conj[0]) } else { c32::new(0.0, 0.0) };
                let expected = kept + beta * products.sum::<c32>();
                prop_assert!((got[at] - expected).norm_sqr() < 1e-8, "{} {expected}", got[at]);
            }
        }
    }
}
