//! Products of many shapes, strides and element types through `gemm`: a checksum of each, or times.
//!
//! ```text
//! gemm-products checksums [COUNT]     a line a product: what it was, and a checksum of all of the destination's bytes
//! gemm-products times [ROUNDS]        a line a shape: median, least and largest nanoseconds
//! ```

use std::hint::black_box;
use std::time::Instant;

use gemm::{f16, gemm, Parallelism};

/// A generator of numbers that look random, and are the same every time.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> usize {
        (self.next() % end) as usize
    }

    fn value(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    }
}

trait Element: Copy + 'static {
    const NAME: &'static str;
    fn of(value: f64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! element {
    ($type:ty, $name:literal, $of:expr) => {
        impl Element for $type {
            const NAME: &'static str = $name;
            fn of(value: f64) -> Self {
                $of(value)
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    };
}
element!(f32, "f32", |value| value as f32);
element!(f64, "f64", |value| value);
element!(f16, "f16", f16::from_f64);

/// A matrix in a piece of memory: values, first element, distance of columns and of rows.
struct Matrix<T> {
    values: Vec<T>,
    start: isize,
    column_stride: isize,
    row_stride: isize,
}

impl<T: Element> Matrix<T> {
    fn new(numbers: &mut Numbers, rows: usize, columns: usize, any_layout: bool) -> Self {
        let mut pick = |end| if any_layout { numbers.below(end) } else { 0 };
        let (by_column, gap, turned) = (pick(2) == 1, pick(3), [pick(4) == 3, pick(4) == 3]);
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
        let values = (0..lines * (length + gap) + 1).map(|_| T::of(numbers.value()));
        let values = values.collect();
        Self {
            values,
            start,
            column_stride,
            row_stride,
        }
    }

    fn at(&self) -> *const T {
        self.values.as_ptr().wrapping_offset(self.start)
    }
}

/// One product; returns the destination.
fn multiply<T: Element>(
    [dst, lhs, rhs]: [&Matrix<T>; 3],
    [m, n, k]: [usize; 3],
    read_dst: bool,
    parallelism: Parallelism,
    to: &mut [T],
) {
    let start = to.as_mut_ptr().wrapping_offset(dst.start);
    // SAFETY: matrices inside of vectors.
    unsafe {
        gemm(
            m,
            n,
            k,
            start,
            dst.column_stride,
            dst.row_stride,
            read_dst,
            lhs.at(),
            lhs.column_stride,
            lhs.row_stride,
            rhs.at(),
            rhs.column_stride,
            rhs.row_stride,
            T::of(0.5),
            T::of(1.5),
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn checksum<T: Element>(numbers: &mut Numbers) {
    let large = numbers.below(20) == 0;
    let most = if large { 700 } else { 70 };
    let [m, n, k] = [0; 3].map(|_| numbers.below(most));
    let [dst, lhs, rhs] = [(m, n), (m, k), (k, n)]
        .map(|(rows, columns)| Matrix::<T>::new(numbers, rows, columns, true));
    let (read_dst, threads) = (numbers.below(2) == 1, numbers.below(3));
    let parallelism = match threads {
        0 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    };
    let mut to = dst.values.clone();
    multiply(
        [&dst, &lhs, &rhs],
        [m, n, k],
        read_dst,
        parallelism,
        &mut to,
    );
    let sum = to.iter().fold(0u64, |sum, value| {
        (sum ^ value.bits())
            .wrapping_mul(0x100000001b3)
            .rotate_left(5)
    });
    let strides = [&dst, &lhs, &rhs].map(|matrix| (matrix.row_stride, matrix.column_stride));
    println!(
        "{} {m} {n} {k} {strides:?} {read_dst} {threads}: {sum:016x}",
        T::NAME
    );
}

/// As many weights elsewhere as a model has, so that each product looks whether it is with one of them.
#[cfg(wick)]
fn weights_elsewhere() -> Vec<(Vec<f32>, gemm::wick::Registration)> {
    let weights = (0..300).map(|_| {
        let placeholder = vec![0f32; 64];
        let range = placeholder.as_ptr_range();
        let addresses = range.start as usize..range.end as usize;
        let product = Box::new(|_: &[f32], _: &mut [f32]| Ok(()));
        (
            placeholder,
            gemm::wick::register(addresses, [8, 8], product),
        )
    });
    weights.collect()
}

fn time<T: Element>([m, n, k]: [usize; 3], rounds: usize) {
    let mut numbers = Numbers(7);
    // As candle's linear layers: the right side is a transposed weight.
    let lhs = Matrix::<T>::new(&mut numbers, m, k, false);
    let weight = Matrix::<T>::new(&mut numbers, n, k, false);
    let rhs = Matrix {
        row_stride: weight.column_stride,
        column_stride: weight.row_stride,
        ..weight
    };
    let dst = Matrix::<T>::new(&mut numbers, m, n, false);
    let mut to = dst.values.clone();
    let repeats = (20_000_000 / (m * n * k).max(1)).clamp(1, 20_000);
    let mut nanos: Vec<u128> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..repeats {
                multiply(
                    [&dst, &lhs, &rhs],
                    [m, n, k],
                    false,
                    Parallelism::None,
                    black_box(&mut to),
                );
            }
            start.elapsed().as_nanos() / repeats as u128
        })
        .collect();
    nanos.sort_unstable();
    let (median, least, most) = (nanos[rounds / 2], nanos[0], nanos[rounds - 1]);
    println!("{} {m}x{k} * {k}x{n}: {median} {least} {most}", T::NAME);
}

fn main() {
    let mut words = std::env::args().skip(1);
    let what = words.next().unwrap_or_default();
    let count: usize = words
        .next()
        .and_then(|count| count.parse().ok())
        .unwrap_or(11);
    match what.as_str() {
        "checksums" => {
            let mut numbers = Numbers(0x9e3779b97f4a7c15);
            for _ in 0..count {
                checksum::<f32>(&mut numbers);
                checksum::<f64>(&mut numbers);
                checksum::<f16>(&mut numbers);
            }
        }
        "times" => {
            #[cfg(wick)]
            let _weights = weights_elsewhere();
            for shape in [
                [1, 1, 1],
                [1, 16, 16],
                [1, 64, 64],
                [8, 64, 64],
                [1, 576, 576],
                [64, 576, 576],
                [1, 1536, 576],
            ] {
                time::<f32>(shape, count);
                time::<f16>(shape, count);
            }
        }
        _ => println!("checksums [COUNT] or times [ROUNDS]; scripts/compare_gemm.sh runs both"),
    }
}
