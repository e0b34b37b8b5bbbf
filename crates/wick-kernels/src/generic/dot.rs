//! Dots of a panel of rows with all tokens.
//!
//! ```text
//! for each block of up to TOKEN_BLOCK tokens:
//!     accumulators[panel rows][block tokens] = 0            one vector each
//!     for each span of k:
//!         copy the block's inputs of the span side by side  half of L1
//!         for each group of 3 rows, for each group of 4 (or 8) tokens:
//!             12 (24) accumulators in registers; a widened weight serves 4 (8) tokens
//!     lane sums, then the elements after the last whole vector
//! ```
//! The copy is there because inputs lie `k` floats apart: when that is a multiple of a page they
//! compete for the same few lines of L1. Weights of the next group are prefetched, their spans
//! being too short for the hardware to see a stream.
//!
//! Up to 4 tokens: `stream`.

mod stream;

use self::stream::STREAM_TOKENS;
use super::{prefetch_span, Lanes, Weight};

/// Rows of a panel: one call of the kernel.
pub(crate) const ROW_PANEL: usize = 48;

/// Tokens of a block.
const TOKEN_BLOCK: usize = 16;

/// Elements of a span.
const SPAN: usize = 256;

/// Rows of a register block; with 4 tokens: 3 x 4 accumulators + 3 weights + 1 input = 16 registers,
/// with 8 tokens 28 of 32.
const GROUP_ROWS: usize = 3;

/// The dot of two slices.
///
/// # Safety
/// The CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let body = a.len() - a.len() % L::COUNT;
    let mut i = 0;
    // SAFETY: `i + L::COUNT <= body <= a.len() == b.len()`.
    let mut sum = unsafe {
        let mut total = L::zero();
        while i < body {
            total = L::fma(
                L::load(a.as_ptr().add(i)),
                L::load(b.as_ptr().add(i)),
                total,
            );
            i += L::COUNT;
        }
        L::sum(total)
    };
    for (a, b) in a[body..].iter().zip(&b[body..]) {
        sum = a.mul_add(*b, sum);
    }
    sum
}

/// `out[r * tokens + t] = rows[r] . x[t]`; every row holds exactly `x.len() / tokens` weights.
///
/// # Safety
/// The CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn dot_panel<L: Lanes, W: Weight>(
    rows: &[&[u8]],
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    assert!(tokens > 0 && rows.len() <= ROW_PANEL);
    let k = x.len() / tokens;
    assert_eq!(x.len(), k * tokens);
    assert_eq!(out.len(), rows.len() * tokens);
    let mut pointers = [std::ptr::null(); ROW_PANEL];
    for (pointer, row) in pointers.iter_mut().zip(rows) {
        assert_eq!(row.len(), k * W::SIZE);
        *pointer = row.as_ptr();
    }
    let panel = Panel {
        rows: &pointers[..rows.len()],
        k,
    };
    // SAFETY: the rows were just measured; token blocks lie inside `x` and `out`.
    unsafe {
        let mut first = 0;
        while first < tokens {
            let inputs = Inputs {
                x: x.as_ptr().add(first * k),
                stride: k,
                count: TOKEN_BLOCK.min(tokens - first),
            };
            let out = Outputs {
                out: out.as_mut_ptr().add(first),
                stride: tokens,
            };
            if inputs.count <= STREAM_TOKENS {
                panel.stream::<L, W>(&inputs, &out);
            } else {
                panel.token_block::<L, W>(&inputs, &out);
            }
            first += inputs.count;
        }
    }
}

/// Rows of one call: each pointer is valid for `k` weights.
struct Panel<'p> {
    rows: &'p [*const u8],
    k: usize,
}

/// Inputs of some tokens: token `t` starts at `x + t * stride`.
struct Inputs {
    x: *const f32,
    stride: usize,
    count: usize,
}

impl Inputs {
    /// The start of the inputs of token `t`.
    fn of_token(&self, t: usize) -> *const f32 {
        self.x.wrapping_add(t * self.stride)
    }
}

/// Where dots go: that of row `r` and token `t` to `out[r * stride + t]`.
struct Outputs {
    out: *mut f32,
    stride: usize,
}

impl Outputs {
    /// The outputs from row `r` on.
    fn of_row(&self, r: usize) -> Self {
        Self {
            out: self.out.wrapping_add(r * self.stride),
            stride: self.stride,
        }
    }

    /// Stores one dot.
    ///
    /// # Safety
    /// There is room for row `r` and token `t`.
    #[inline(always)]
    unsafe fn set(&self, r: usize, t: usize, dot: f32) {
        // SAFETY: the caller's promise.
        unsafe { *self.out.add(r * self.stride + t) = dot }
    }
}

/// A span of the inputs of a block, `(TOKEN_BLOCK, SPAN)`.
#[repr(align(64))]
struct Packed([f32; TOKEN_BLOCK * SPAN]);

/// One vector of partial sums for each row of a panel and token of a block.
type Totals<V> = [[V; TOKEN_BLOCK]; ROW_PANEL];

impl Panel<'_> {
    /// Dots with a block of tokens, span by span, inputs packed.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `inputs` are of `k` floats, and `out` has room for the dots
    /// of all rows with all of them.
    #[inline(always)]
    unsafe fn token_block<L: Lanes, W: Weight>(&self, inputs: &Inputs, out: &Outputs) {
        let body = self.k - self.k % L::COUNT;
        let mut packed = Packed([0.0; TOKEN_BLOCK * SPAN]);
        // SAFETY: spans end at `body <= k`, with `len <= SPAN` and `count <= TOKEN_BLOCK`; `totals`
        // has a place for each row and token.
        unsafe {
            let mut totals: Totals<L::Vector> = [[L::zero(); TOKEN_BLOCK]; ROW_PANEL];
            let mut start = 0;
            while start < body {
                let len = SPAN.min(body - start);
                for t in 0..inputs.count {
                    let source = inputs.of_token(t).add(start);
                    let target = packed.0.as_mut_ptr().add(t * SPAN);
                    std::ptr::copy_nonoverlapping(source, target, len);
                }
                let span = PackedSpan {
                    x: packed.0.as_ptr(),
                    count: inputs.count,
                    start_bytes: start * W::SIZE,
                    len,
                };
                self.span::<L, W>(&span, &mut totals);
                start += len;
            }
            for (r, (row, totals)) in self.rows.iter().zip(&totals).enumerate() {
                for (t, total) in totals[..inputs.count].iter().enumerate() {
                    let x = inputs.of_token(t);
                    out.set(r, t, finish::<L, W>(L::sum(*total), *row, x, body..self.k));
                }
            }
        }
    }

    /// Adds the products of a span to `totals`.
    ///
    /// # Safety
    /// The CPU has the features of `L`; the span ends at `k` or before, and is whole vectors.
    #[inline(always)]
    unsafe fn span<L: Lanes, W: Weight>(&self, span: &PackedSpan, totals: &mut Totals<L::Vector>) {
        let groups = self.rows.chunks(GROUP_ROWS);
        let next = self.rows[GROUP_ROWS.min(self.rows.len())..].chunks(GROUP_ROWS);
        let next = next.chain(std::iter::once(&[] as &[*const u8]));
        for ((rows, totals), next) in groups.zip(totals.chunks_mut(GROUP_ROWS)).zip(next) {
            // SAFETY: as this function; the lengths of `rows` are those of the arms.
            unsafe {
                match *rows {
                    [a, b, c] => span.tokens::<L, W, 3>([a, b, c], next, totals),
                    [a, b] => span.tokens::<L, W, 2>([a, b], next, totals),
                    [a] => span.tokens::<L, W, 1>([a], next, totals),
                    _ => unreachable!("chunks are of 1 to {GROUP_ROWS} rows"),
                }
            }
        }
    }
}

/// A span of packed inputs, `len` floats each, `SPAN` apart, and where it starts in the rows.
struct PackedSpan {
    x: *const f32,
    count: usize,
    start_bytes: usize,
    len: usize,
}

impl PackedSpan {
    /// Adds the products of `R` rows with all inputs to `totals[row][token]`.
    ///
    /// # Safety
    /// The CPU has the features of `L`; rows are valid for the span, which is whole vectors; `totals`
    /// has `R` rows.
    #[inline(always)]
    unsafe fn tokens<L: Lanes, W: Weight, const R: usize>(
        &self,
        rows: [*const u8; R],
        next: &[*const u8],
        totals: &mut [[L::Vector; TOKEN_BLOCK]],
    ) {
        let step = (self.len * W::SIZE).div_ceil(self.count.div_ceil(L::GROUP_TOKENS));
        let mut t = 0;
        // SAFETY: groups of tokens end at `count`; a prefetch may name any address.
        unsafe {
            let rows = rows.map(|row| row.add(self.start_bytes));
            while t < self.count {
                let offset = self.start_bytes + t / L::GROUP_TOKENS * step;
                for row in next {
                    prefetch_span::<L>(row.wrapping_add(offset), step);
                }
                let x = self.x.add(t * SPAN);
                let totals = totals.as_mut_ptr().cast::<L::Vector>().add(t);
                match (self.count - t).min(L::GROUP_TOKENS) {
                    1 => self.register_block::<L, W, R, 1>(rows, x, totals),
                    2 => self.register_block::<L, W, R, 2>(rows, x, totals),
                    3 => self.register_block::<L, W, R, 3>(rows, x, totals),
                    4 => self.register_block::<L, W, R, 4>(rows, x, totals),
                    5 => self.register_block::<L, W, R, 5>(rows, x, totals),
                    6 => self.register_block::<L, W, R, 6>(rows, x, totals),
                    7 => self.register_block::<L, W, R, 7>(rows, x, totals),
                    _ => self.register_block::<L, W, R, 8>(rows, x, totals),
                }
                t += L::GROUP_TOKENS;
            }
        }
    }

    /// `R x T` accumulators over the span, kept in `totals` (`TOKEN_BLOCK` apart) between spans.
    ///
    /// # Safety
    /// As [`PackedSpan::tokens`], with `T` inputs from `x` on; `totals` is valid for `R` rows of `T`
    /// vectors.
    #[inline(always)]
    unsafe fn register_block<L: Lanes, W: Weight, const R: usize, const T: usize>(
        &self,
        rows: [*const u8; R],
        x: *const f32,
        totals: *mut L::Vector,
    ) {
        // SAFETY: rows and inputs are valid for `len` elements, which are whole vectors.
        unsafe {
            let mut sums = [[L::zero(); T]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                for (t, sum) in sums.iter_mut().enumerate() {
                    *sum = *totals.add(r * TOKEN_BLOCK + t);
                }
            }
            let mut i = 0;
            while i < self.len {
                let mut w = [L::zero(); R];
                for (w, row) in w.iter_mut().zip(&rows) {
                    *w = W::load::<L>(row.add(i * W::SIZE));
                }
                for t in 0..T {
                    let x = L::load(x.add(t * SPAN + i));
                    for (sums, w) in sums.iter_mut().zip(&w) {
                        sums[t] = L::fma(*w, x, sums[t]);
                    }
                }
                i += L::COUNT;
            }
            for (r, sums) in sums.iter().enumerate() {
                for (t, sum) in sums.iter().enumerate() {
                    *totals.add(r * TOKEN_BLOCK + t) = *sum;
                }
            }
        }
    }
}

/// Adds the elements after the last whole vector to a lane sum, one by one.
///
/// # Safety
/// The CPU has the features of `L`; `row` and `x` are valid up to `tail.end` elements.
#[inline(always)]
unsafe fn finish<L: Lanes, W: Weight>(
    mut sum: f32,
    row: *const u8,
    x: *const f32,
    tail: std::ops::Range<usize>,
) -> f32 {
    for i in tail {
        // SAFETY: `i < tail.end`.
        sum = unsafe { W::one::<L>(row.add(i * W::SIZE)).mul_add(*x.add(i), sum) };
    }
    sum
}
