//! Speed of the kernels beside a plain read of the same bytes, on each instruction set.
//!
//! Goals: with one token, how far a product is from the rate at which memory can be read at all;
//! with many, how much less a token costs.
//! Non-goals: matrices that fit a cache. The weights are a buffer of 2 GB, walked so that nothing
//! is met again before all else was. There are two ways to only read: "plain", one sum from start to
//! end, and "best", four streams at a time with prefetches, which is the fastest known. Reads and
//! products take turns piece by piece, because other work on the machine disturbs both: the ratios
//! are what counts. Figures are medians of five passes with the least and the most.
//!
//! `cargo bench -p wick-kernels --bench gemv`; `-- --test` runs a small buffer once, as a check.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use rayon::prelude::*;
use rayon::ThreadPool;
use wick_kernels::{
    dot_rows, isa_name, packed_groups, read_plain, read_streams, Accumulator, PackedBits,
    PackedRows, WeightDtype,
};

/// Asks for an instruction set (see `kernels.rs`).
const ISA_VARIABLE: &str = "WICK_ISA";

/// The sets measured, each in a process of its own.
const ISAS: [&str; 2] = ["avx2+fma+f16c", "avx512f"];

const PASSES: usize = 5;

const DTYPES: [WeightDtype; 4] = [
    WeightDtype::F32,
    WeightDtype::F16,
    WeightDtype::Bf16,
    WeightDtype::I8,
];

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
    // Small patterns: valid, finite numbers in all types.
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
    let columns = "threads | plain GB/s | best GB/s | product GB/s | / plain | / best |";
    println!("| one token | dtype | {columns}\n|---|---|---|---|---|---|---|---|");
    for &shape in plan.shapes {
        for dtype in DTYPES {
            for pool in &pools {
                pool.install(|| dense(&bytes, shape, dtype));
            }
        }
        for bits in PackedBits::ALL {
            for pool in &pools {
                pool.install(|| packed(&bytes, shape, bits));
            }
        }
    }
    println!("\n| gathered rows, f16 | product | {columns}\n|---|---|---|---|---|---|---|---|");
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
    let matrices = bytes.len() / (rows * row_bytes);
    let x = vec![0.5f32; width];
    let mut out = vec![0f32; rows];
    let turns = Turns::of(matrices, |i| {
        // What is read now is far from what the others read in this turn.
        let row_of = |turn: usize| {
            let matrix = (i + turn * matrices / 3) % matrices;
            move |r: usize| &bytes[(matrix * rows + r) * row_bytes..][..row_bytes]
        };
        let plain = seconds(|| read(rows, row_of(0), read_one_by_one));
        let best = seconds(|| read(rows, row_of(1), read_streams));
        let product = seconds(|| dot_rows(dtype, rows, row_of(2), &x, 1, &mut out));
        black_box(&out);
        [plain, best, product]
    });
    let threads = rayon::current_num_threads();
    let figures = turns.figures(rows * row_bytes);
    println!(
        "| [{rows}, {width}] | {} | {threads} | {figures} |",
        dtype.name()
    );
}

/// One line: packed rows with one token, all matrices in the buffer. Scales lie elsewhere and are not counted.
fn packed(bytes: &[u8], (rows, width): (usize, usize), bits: PackedBits) {
    let row_bytes = bits.row_bytes(width);
    let matrix_bytes = rows * row_bytes;
    let matrices = bytes.len() / matrix_bytes;
    let scales = vec![0x3c; 2 * rows * packed_groups(width)];
    let x = vec![0.5f32; width];
    let mut out = vec![0f32; rows];
    let turns = Turns::of(matrices, |i| {
        let matrix = |turn: usize| {
            let matrix = (i + turn * matrices / 3) % matrices;
            &bytes[matrix * matrix_bytes..][..matrix_bytes]
        };
        let row_of = |turn: usize| {
            let matrix = matrix(turn);
            move |r: usize| &matrix[r * row_bytes..][..row_bytes]
        };
        let plain = seconds(|| read(rows, row_of(0), read_one_by_one));
        let best = seconds(|| read(rows, row_of(1), read_streams));
        let weights = matrix(2);
        let packed = PackedRows {
            bits,
            weights,
            scales: &scales,
        };
        let product = seconds(|| packed.dot(&x, 1, &mut out));
        black_box(&out);
        [plain, best, product]
    });
    let threads = rayon::current_num_threads();
    let (count, figures) = (bits.count(), turns.figures(matrix_bytes));
    println!("| [{rows}, {width}] | {count} bits | {threads} | {figures} |");
}

/// Two lines: dots with, and sums of, rows that lie anywhere.
fn gathered(bytes: &[u8], (rows, width): (usize, usize)) {
    let row_bytes = 2 * width;
    // An odd factor jumps far, and meets each slot of a power of two of them.
    let slots = 1 << (bytes.len() / row_bytes).ilog2();
    let slot = |i: usize| i.wrapping_mul(0x9e37_79b1) % slots * row_bytes;
    let (x, mut out) = (vec![0.5f32; width], vec![0f32; rows]);
    let mut sums = Accumulator::new();
    for down in [false, true] {
        let turns = Turns::of((slots / rows / 3).max(1), |i| {
            let row_of = |turn: usize| {
                move |r: usize| &bytes[slot((3 * i + turn) * rows + r)..][..row_bytes]
            };
            let plain = seconds(|| read(rows, row_of(0), read_one_by_one));
            let best = seconds(|| read(rows, row_of(1), read_streams));
            let product = seconds(|| {
                if down {
                    sums.reset(1, width);
                    sums.add_rows(WeightDtype::F16, rows, row_of(2), &out);
                } else {
                    dot_rows(WeightDtype::F16, rows, row_of(2), &x, 1, &mut out);
                }
            });
            black_box((&sums, &out));
            [plain, best, product]
        });
        let name = if down { "sum" } else { "dot" };
        let threads = rayon::current_num_threads();
        let figures = turns.figures(rows * row_bytes);
        println!("| {rows} x {width} | {name} | {threads} | {figures} |");
    }
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
                    [dot, sum]
                })
            });
            let flop = 2e-9 * (rows * width * tokens) as f64;
            let [dot, sum] =
                [turns.spread(|[dot, _]| *dot), turns.spread(|[_, sum]| *sum)].map(|spread| {
                    let ms = spread.map(|seconds| 1e3 * seconds / tokens as f64);
                    format!("{} | {:.0}", show(ms, 2), flop / spread[0])
                });
            println!("| {tokens} | {} | {dot} | {sum} |", dtype.name());
        }
    }
}

/// Seconds of `N` things that took turns, summed over each pass.
struct Turns<const N: usize> {
    passes: Vec<[f64; N]>,
    turns: usize,
}

impl<const N: usize> Turns<N> {
    /// Passes of `turns` turns, after one turn to warm up.
    fn of(turns: usize, mut turn: impl FnMut(usize) -> [f64; N]) -> Self {
        turn(0);
        let mut passes = vec![[0.0; N]; PASSES];
        for pass in &mut passes {
            for i in 0..turns {
                let seconds = turn(i);
                pass.iter_mut().zip(seconds).for_each(|(sum, s)| *sum += s);
            }
        }
        Self { passes, turns }
    }

    /// Median, least and most of a figure of a pass.
    fn spread(&self, figure: impl Fn(&[f64; N]) -> f64) -> [f64; 3] {
        let mut figures: Vec<f64> = self.passes.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        [
            figures[figures.len() / 2],
            figures[0],
            figures[figures.len() - 1],
        ]
    }
}

impl Turns<3> {
    /// Rates of both ways to read and of the product in GB/s, then the last over the others.
    fn figures(&self, turn_bytes: usize) -> String {
        let gigabytes = (self.turns * turn_bytes) as f64 / 1e9;
        let rates = [0, 1, 2].map(|i| show(self.spread(|pass| gigabytes / pass[i]), 1));
        let ratios = [0, 1].map(|i| show(self.spread(|pass| pass[i] / pass[2]), 2));
        format!("{} | {}", rates.join(" | "), ratios.join(" | "))
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

/// Reads rows four at a time on all threads, in pieces as large as those of the kernels.
fn read<'a, R>(rows: usize, row: R, sum: fn([&[u8]; 4]) -> u64)
where
    R: Fn(usize) -> &'a [u8] + Sync,
{
    let groups = rows.div_ceil(4);
    let piece = groups.div_ceil(8 * rayon::current_num_threads());
    let of_group = |g: usize| sum([0, 1, 2, 3].map(|i| row((4 * g + i).min(rows - 1))));
    let sums = (0..groups)
        .into_par_iter()
        .with_min_len(piece)
        .map(of_group);
    black_box(sums.reduce(|| 0, u64::wrapping_add));
}

/// One row after the other.
fn read_one_by_one(rows: [&[u8]; 4]) -> u64 {
    rows.iter()
        .fold(0, |sum, row| sum.wrapping_add(read_plain(row)))
}
