//! Speed of the kernels beside a plain read of the same bytes, on each instruction set.
//!
//! Goals: with one token, how far a product is from the rate at which memory can be read at all;
//! with many, how much less a token costs.
//! Non-goals: matrices that fit a cache. The weights are a buffer of 2 GB, walked so that nothing
//! is met again before all else was. Reads and products take turns piece by piece, because other
//! work on the machine disturbs both: the ratio is what counts. Figures are medians of five passes
//! with the least and the most.
//!
//! `cargo bench -p wick-kernels --bench gemv`; `-- --test` runs a small buffer once, as a check.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use rayon::prelude::*;
use rayon::ThreadPool;
use wick_kernels::{dot_rows, isa_name, Accumulator, WeightDtype};

/// Asks for an instruction set (see `kernels.rs`).
const ISA_VARIABLE: &str = "WICK_ISA";

/// The sets measured, each in a process of its own.
const ISAS: [&str; 2] = ["avx2+fma+f16c", "avx512f"];

const PASSES: usize = 5;

const DTYPES: [WeightDtype; 3] = [WeightDtype::F32, WeightDtype::F16, WeightDtype::Bf16];

/// What to run.
struct Plan {
    buffer_bytes: usize,
    /// `(rows, width)` of matrices.
    shapes: &'static [(usize, usize)],
    /// `(rows, width)` of sets of gathered rows.
    gathers: &'static [(usize, usize)],
    tokens: &'static [usize],
}

const FULL: Plan = Plan {
    buffer_bytes: 2 << 30,
    shapes: &[(4096, 16384), (16384, 4096)],
    gathers: &[(500, 8192), (1600, 8192), (500, 16384), (1600, 16384)],
    tokens: &[1, 2, 4, 8, 16, 32, 128],
};

const SMALL: Plan = Plan {
    buffer_bytes: 1 << 20,
    shapes: &[(67, 130)],
    gathers: &[(50, 130)],
    tokens: &[1, 9],
};

fn main() {
    let test = std::env::args().any(|arg| arg == "--test");
    if std::env::var(ISA_VARIABLE).is_ok() {
        return measure(if test { &SMALL } else { &FULL });
    }
    for isa in ISAS {
        let this = std::env::current_exe().expect("a bench has a path");
        let arguments: &[&str] = if test { &["--test"] } else { &[] };
        let status = Command::new(this)
            .args(arguments)
            .env(ISA_VARIABLE, isa)
            .status();
        assert!(status.is_ok_and(|status| status.success()), "{isa} failed");
    }
}

/// All tables for the instruction set in use.
fn measure(plan: &Plan) {
    let asked = std::env::var(ISA_VARIABLE).unwrap_or_default();
    if !isa_name().starts_with(&asked) {
        return println!("{asked}: not on this machine");
    }
    // Small patterns: valid, finite numbers in all three types.
    let mut bytes = vec![0x11u8; plan.buffer_bytes];
    bytes
        .iter_mut()
        .skip(1)
        .step_by(2)
        .for_each(|byte| *byte = 0x3c);
    let most = rayon::current_num_threads();
    let pools = [1, most].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().expect("threads can be started")
    });
    println!("\n### {}\n", isa_name());
    println!("| one token | dtype | threads | read GB/s | product GB/s | ratio |");
    println!("|---|---|---|---|---|---|");
    for &shape in plan.shapes {
        for dtype in DTYPES {
            for pool in &pools {
                pool.install(|| dense(&bytes, shape, dtype));
            }
        }
    }
    println!("\n| gathered rows, f16 | threads | read GB/s | dot GB/s | ratio | read GB/s | sum GB/s | ratio |");
    println!("|---|---|---|---|---|---|---|---|");
    for &shape in plan.gathers {
        for pool in &pools {
            pool.install(|| gathered(&bytes, shape));
        }
    }
    many_tokens(&bytes, plan, &pools[1]);
}

/// One line: `dot_rows` with one token on all matrices in the buffer.
fn dense(bytes: &[u8], (rows, width): (usize, usize), dtype: WeightDtype) {
    let row_bytes = width * dtype.size_bytes();
    let matrices: Vec<&[u8]> = bytes.chunks_exact(rows * row_bytes).collect();
    let x = vec![0.5f32; width];
    let mut out = vec![0f32; rows];
    let turns = Turns::of(matrices.len(), |i| {
        let other = matrices[(i + matrices.len() / 2) % matrices.len()];
        let read = seconds(|| read(other));
        let row = |r: usize| &matrices[i][r * row_bytes..(r + 1) * row_bytes];
        let product = seconds(|| dot_rows(dtype, rows, row, &x, 1, &mut out));
        black_box(&out);
        (read, product)
    });
    let threads = rayon::current_num_threads();
    let figures = turns.figures(rows * row_bytes);
    println!(
        "| [{rows}, {width}] | {} | {threads} | {figures} |",
        dtype.name()
    );
}

/// One line: dots with, and sums of, rows that lie anywhere.
fn gathered(bytes: &[u8], (rows, width): (usize, usize)) {
    let row_bytes = 2 * width;
    let slots = bytes.len() / row_bytes;
    // An odd factor near the golden ratio: far jumps that meet every slot (a power of two of them).
    let slots = 1 << slots.ilog2();
    let slot = |i: usize| i.wrapping_mul(0x9e37_79b1) % slots * row_bytes;
    let (x, mut out) = (vec![0.5f32; width], vec![0f32; rows]);
    let mut sums = Accumulator::new();
    let sets = (slots / rows / 2).max(1);
    let mut line = format!("| {rows} x {width} | {}", rayon::current_num_threads());
    for down in [false, true] {
        let turns = Turns::of(sets, |i| {
            let row_of = |set: usize| {
                move |r: usize| {
                    let start = slot(set * rows + r);
                    &bytes[start..start + row_bytes]
                }
            };
            let read = seconds(|| {
                let row = row_of(2 * i);
                let sum: u64 = (0..rows).into_par_iter().map(|r| sum_of(row(r))).sum();
                black_box(sum);
            });
            let row = row_of(2 * i + 1);
            let product = seconds(|| {
                if down {
                    sums.reset(1, width);
                    sums.add_rows(WeightDtype::F16, rows, row, &out);
                } else {
                    dot_rows(WeightDtype::F16, rows, row, &x, 1, &mut out);
                }
            });
            black_box((&sums, &out));
            (read, product)
        });
        line += &format!(" | {}", turns.figures(rows * row_bytes));
    }
    println!("{line} |");
}

/// The table of many tokens on the last shape.
fn many_tokens(bytes: &[u8], plan: &Plan, pool: &ThreadPool) {
    let (rows, width) = plan.shapes[plan.shapes.len() - 1];
    println!(
        "\n| [{rows}, {width}], tokens | dtype | dot ms/token | GFLOP/s | sum ms/token | GFLOP/s |"
    );
    println!("|---|---|---|---|---|---|");
    for dtype in DTYPES {
        let row_bytes = width * dtype.size_bytes();
        let row = |r: usize| &bytes[r * row_bytes..(r + 1) * row_bytes];
        for &tokens in plan.tokens {
            let x = vec![0.5f32; tokens * width];
            let mut out = vec![0f32; rows * tokens];
            let mut sums = Accumulator::new();
            let turns = pool.install(|| {
                Turns::of(1, |_| {
                    let dot = seconds(|| dot_rows(dtype, rows, row, &x, tokens, &mut out));
                    let sum = seconds(|| {
                        sums.reset(tokens, width);
                        sums.add_rows(dtype, rows, row, &out);
                    });
                    black_box(&sums);
                    (dot, sum)
                })
            });
            let flop = 2e-9 * (rows * width * tokens) as f64;
            let [dot, sum] =
                [turns.spread(|(dot, _)| *dot), turns.spread(|(_, sum)| *sum)].map(|spread| {
                    let ms = spread.map(|seconds| 1e3 * seconds / tokens as f64);
                    format!("{} | {:.0}", show(ms, 2), flop / spread[0])
                });
            println!("| {tokens} | {} | {dot} | {sum} |", dtype.name());
        }
    }
}

/// Seconds of two things that took turns, summed over each pass.
struct Turns {
    passes: Vec<(f64, f64)>,
    turns: usize,
}

impl Turns {
    /// Passes of `turns` turns, after one turn to warm up.
    fn of(turns: usize, mut turn: impl FnMut(usize) -> (f64, f64)) -> Self {
        turn(0);
        let passes = (0..PASSES).map(|_| {
            (0..turns)
                .map(&mut turn)
                .fold((0.0, 0.0), |sum, turn| (sum.0 + turn.0, sum.1 + turn.1))
        });
        Self {
            passes: passes.collect(),
            turns,
        }
    }

    /// Median, least and most of a figure of a pass.
    fn spread(&self, figure: impl Fn(&(f64, f64)) -> f64) -> [f64; 3] {
        let mut figures: Vec<f64> = self.passes.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        [
            figures[figures.len() / 2],
            figures[0],
            figures[figures.len() - 1],
        ]
    }

    /// Rates of reading and of the product, in GB/s, and the second over the first.
    fn figures(&self, turn_bytes: usize) -> String {
        let gigabytes = (self.turns * turn_bytes) as f64 / 1e9;
        let read = self.spread(|(read, _)| gigabytes / read);
        let product = self.spread(|(_, product)| gigabytes / product);
        let ratio = self.spread(|(read, product)| read / product);
        format!(
            "{} | {} | {}",
            show(read, 1),
            show(product, 1),
            show(ratio, 2)
        )
    }
}

/// `median (least..most)`.
fn show([median, least, most]: [f64; 3], digits: usize) -> String {
    format!("{median:.digits$} ({least:.digits$}..{most:.digits$})")
}

/// Seconds a call takes.
fn seconds(call: impl FnOnce()) -> f64 {
    let start = Instant::now();
    call();
    start.elapsed().as_secs_f64()
}

/// Only reads, on all threads, cut as finely as the kernels cut.
fn read(bytes: &[u8]) {
    let piece = bytes
        .len()
        .div_ceil(8 * rayon::current_num_threads())
        .next_multiple_of(128);
    let sum: u64 = bytes.par_chunks(piece).map(sum_of).sum();
    black_box(sum);
}

/// A sum the compiler turns into vector loads.
fn sum_of(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; 16];
    for block in bytes.as_chunks::<128>().0 {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks().0) {
            *lane = lane.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    lanes.iter().fold(0, |sum, lane| sum.wrapping_add(*lane))
}
