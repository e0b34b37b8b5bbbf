//! Speed of the kernels on one 16384 x 4096 matrix, beside the DRAM read limit of the same run.
//!
//! Goals: show how far one token is from the memory limit (GB/s of weights), and how far many
//! tokens are from the arithmetic limit (GFLOP/s, a multiply-add being two).
//! Non-goals: small matrices, statistics. Times are the best of several repeats.
//!
//! `cargo bench -p wick-kernels`; `-- --test` runs a small matrix once, as a check.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;
use wick_kernels::{dot_rows, isa_name, Accumulator, WeightDtype};

/// What to run.
struct Plan {
    rows: usize,
    width: usize,
    tokens: &'static [usize],
    repeats: usize,
}

const FULL: Plan = Plan {
    rows: 16384,
    width: 4096,
    tokens: &[1, 2, 4, 8, 16, 32, 128],
    repeats: 9,
};

const SMALL: Plan = Plan {
    rows: 67,
    width: 130,
    tokens: &[1, 9],
    repeats: 1,
};

fn main() {
    let plan = if std::env::args().any(|arg| arg == "--test") {
        SMALL
    } else {
        FULL
    };
    let threads = rayon::current_num_threads();
    println!("isa {}, {threads} threads", isa_name());
    println!("matrix {} x {}", plan.rows, plan.width);
    println!("dram read limit {:6.1} GB/s", read_limit(&plan));
    println!("dtype tokens |  dot: GB/s GFLOP/s ms/token |  sum: GB/s GFLOP/s ms/token");
    for dtype in [WeightDtype::F32, WeightDtype::F16, WeightDtype::Bf16] {
        measure(&plan, dtype);
    }
    println!("dram read limit {:6.1} GB/s (again)", read_limit(&plan));
}

/// Bytes a second when all threads only read a buffer of the size of the `f32` matrix.
fn read_limit(plan: &Plan) -> f64 {
    let words = vec![1u64; plan.rows * plan.width / 2];
    let piece = words.len().div_ceil(8 * rayon::current_num_threads());
    let seconds = best_of(plan.repeats, || {
        let sum: u64 = words.par_chunks(piece).map(sum_of).sum();
        assert_eq!(black_box(sum), words.len() as u64);
    });
    words.len() as f64 * 8.0 / seconds / 1e9
}

/// A sum the compiler turns into vector loads.
fn sum_of(words: &[u64]) -> u64 {
    let mut lanes = [0u64; 16];
    let (whole, rest) = words.as_chunks::<16>();
    for words in whole {
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = lane.wrapping_add(*word);
        }
    }
    lanes.iter().sum::<u64>() + rest.iter().sum::<u64>()
}

/// One line for each token count.
fn measure(plan: &Plan, dtype: WeightDtype) {
    let row_bytes = plan.width * dtype.size_bytes();
    // Small patterns: valid, finite numbers in all three types.
    let bytes: Vec<u8> = (0..plan.rows * row_bytes)
        .map(|i| [0x11, 0x3c][i % 2])
        .collect();
    let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
    for &tokens in plan.tokens {
        let x = vec![0.5f32; tokens * plan.width];
        let mut out = vec![0f32; plan.rows * tokens];
        let dot = best_of(plan.repeats, || {
            dot_rows(dtype, plan.rows, row, &x, tokens, &mut out);
            black_box(&out);
        });
        let mut sums = Accumulator::new();
        let sum = best_of(plan.repeats, || {
            sums.reset(tokens, plan.width);
            sums.add_rows(dtype, plan.rows, row, &out);
            black_box(&sums);
        });
        let speed = |seconds: f64| {
            let gigabytes = bytes.len() as f64 / 1e9 / seconds;
            let gigaflops = (2 * plan.rows * plan.width * tokens) as f64 / 1e9 / seconds;
            let ms = seconds * 1e3 / tokens as f64;
            format!("{gigabytes:10.1} {gigaflops:8.1} {ms:8.2}")
        };
        println!(
            "{:5} {tokens:6} | {} | {}",
            dtype.name(),
            speed(dot),
            speed(sum)
        );
    }
}

/// Seconds of the fastest of `repeats` calls, after one that warms up.
fn best_of(repeats: usize, mut call: impl FnMut()) -> f64 {
    call();
    let timed = (0..repeats).map(|_| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    });
    timed.fold(f64::INFINITY, f64::min)
}
