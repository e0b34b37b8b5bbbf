//! Dots of a panel of rows with all tokens.
//!
//! ```text
//! for each block of up to TOKEN_BLOCK tokens:
//!     accumulators[panel rows][block tokens] = 0            one vector each
//!     for each span of k:
//!         copy the block's inputs of the span side by side  half of L1
//!         for each group of 3 rows, for each group of 4 tokens:
//!             12 accumulators in registers; a widened weight serves 4 tokens
//!     lane sums, then the elements after the last whole vector
//! ```
//! The copy is there because inputs lie `k` floats apart: when that is a multiple of a page they
//! compete for the same few lines of L1. Weights of the next group are prefetched, their spans
//! being too short for the hardware to see a stream.
//!
//! With few tokens memory is the limit: a span is then all of `k`, so that a row is read in one
//! go, and one token takes 4 rows at a time.

use super::{prefetch_span, Lanes, Weight};

/// Rows of a panel: one call of the kernel.
pub(crate) const ROW_PANEL: usize = 48;

/// Tokens of a block.
const TOKEN_BLOCK: usize = 16;

/// Elements of a span.
const SPAN: usize = 256;

/// Rows and tokens of a register block: 3 x 4 accumulators + 3 weights + 1 input = 16 registers.
const GROUP_ROWS: usize = 3;
const GROUP_TOKENS: usize = 4;

/// Rows at a time with one token: enough chains to hide the latency of fma.
const STREAM_ROWS: usize = 4;

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
        if tokens == 1 {
            panel.one_token::<L, W>(x.as_ptr(), out);
            return;
        }
        let mut first = 0;
        while first < tokens {
            let inputs = Inputs {
                x: x.as_ptr().add(first * k),
                stride: k,
                count: TOKEN_BLOCK.min(tokens - first),
            };
            panel.token_block::<L, W>(&inputs, out.as_mut_ptr().add(first), tokens);
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

/// A span of the inputs of a block, `(TOKEN_BLOCK, SPAN)`.
#[repr(align(64))]
struct Packed([f32; TOKEN_BLOCK * SPAN]);

/// One vector of partial sums for each row of a panel and token of a block.
type Totals<V> = [[V; TOKEN_BLOCK]; ROW_PANEL];

impl Panel<'_> {
    /// Dots with one token.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `x` is valid for `k` floats, `out` has one place a row.
    #[inline(always)]
    unsafe fn one_token<L: Lanes, W: Weight>(&self, x: *const f32, out: &mut [f32]) {
        let groups = self.rows.chunks(STREAM_ROWS);
        for (rows, out) in groups.zip(out.chunks_mut(STREAM_ROWS)) {
            // SAFETY: as this function; the lengths of `rows` are those of the arms.
            unsafe {
                match *rows {
                    [a, b, c, d] => dot_stream::<L, W, 4>([a, b, c, d], x, self.k, out),
                    [a, b, c] => dot_stream::<L, W, 3>([a, b, c], x, self.k, out),
                    [a, b] => dot_stream::<L, W, 2>([a, b], x, self.k, out),
                    [a] => dot_stream::<L, W, 1>([a], x, self.k, out),
                    _ => unreachable!("chunks are of 1 to {STREAM_ROWS} rows"),
                }
            }
        }
    }

    /// Dots with a block of tokens; row `r` of token `t` goes to `out[r * out_stride + t]`.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `inputs` are of `k` floats, and `out` has room for the dots
    /// of all rows with all of them.
    #[inline(always)]
    unsafe fn token_block<L: Lanes, W: Weight>(
        &self,
        inputs: &Inputs,
        out: *mut f32,
        out_stride: usize,
    ) {
        let body = self.k - self.k % L::COUNT;
        // SAFETY: spans end at `body <= k`; `totals` has a place for each row and token.
        unsafe {
            let mut totals: Totals<L::Vector> = [[L::zero(); TOKEN_BLOCK]; ROW_PANEL];
            if inputs.count <= GROUP_TOKENS {
                self.span::<L, W>(inputs, 0, body, &mut totals);
            } else {
                self.packed_spans::<L, W>(inputs, body, &mut totals);
            }
            for (r, (row, totals)) in self.rows.iter().zip(&totals).enumerate() {
                for (t, total) in totals[..inputs.count].iter().enumerate() {
                    let x = inputs.x.add(t * inputs.stride);
                    let sum = finish::<L, W>(L::sum(*total), *row, x, body..self.k);
                    *out.add(r * out_stride + t) = sum;
                }
            }
        }
    }

    /// Adds the products of elements `0..body`, span by span, inputs packed.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `inputs` are of `body` floats or more, whole vectors.
    #[inline(always)]
    unsafe fn packed_spans<L: Lanes, W: Weight>(
        &self,
        inputs: &Inputs,
        body: usize,
        totals: &mut Totals<L::Vector>,
    ) {
        let mut packed = Packed([0.0; TOKEN_BLOCK * SPAN]);
        let mut start = 0;
        while start < body {
            let len = SPAN.min(body - start);
            // SAFETY: `start + len <= body`, `len <= SPAN`, `count <= TOKEN_BLOCK`.
            unsafe {
                for t in 0..inputs.count {
                    let source = inputs.x.add(t * inputs.stride + start);
                    let target = packed.0.as_mut_ptr().add(t * SPAN);
                    std::ptr::copy_nonoverlapping(source, target, len);
                }
                let inputs = Inputs {
                    x: packed.0.as_ptr(),
                    stride: SPAN,
                    count: inputs.count,
                };
                self.span::<L, W>(&inputs, start, len, totals);
            }
            start += len;
        }
    }

    /// Adds the products of elements `start..start + len` to `totals`.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `inputs` start at the span and are of `len` floats, whole
    /// vectors; `start + len <= k`.
    #[inline(always)]
    unsafe fn span<L: Lanes, W: Weight>(
        &self,
        inputs: &Inputs,
        start: usize,
        len: usize,
        totals: &mut Totals<L::Vector>,
    ) {
        let groups = self.rows.chunks(GROUP_ROWS);
        let next = self.rows[GROUP_ROWS.min(self.rows.len())..].chunks(GROUP_ROWS);
        let next = next.chain(std::iter::once(&[] as &[*const u8]));
        for ((rows, totals), next) in groups.zip(totals.chunks_mut(GROUP_ROWS)).zip(next) {
            let span = Span {
                start_bytes: start * W::SIZE,
                len,
                next,
            };
            // SAFETY: as this function; the lengths of `rows` are those of the arms.
            unsafe {
                match *rows {
                    [a, b, c] => span.tokens::<L, W, 3>([a, b, c], inputs, totals),
                    [a, b] => span.tokens::<L, W, 2>([a, b], inputs, totals),
                    [a] => span.tokens::<L, W, 1>([a], inputs, totals),
                    _ => unreachable!("chunks are of 1 to {GROUP_ROWS} rows"),
                }
            }
        }
    }
}

/// A part of a row group: `len` weights from `start_bytes` on, and the rows that come next.
struct Span<'p> {
    start_bytes: usize,
    len: usize,
    next: &'p [*const u8],
}

impl Span<'_> {
    /// Adds the products of `R` rows with all inputs to `totals[row][token]`.
    ///
    /// # Safety
    /// The CPU has the features of `L`; rows and inputs are valid for the span; `len` is whole
    /// vectors; `totals` has `R` rows.
    #[inline(always)]
    unsafe fn tokens<L: Lanes, W: Weight, const R: usize>(
        &self,
        rows: [*const u8; R],
        inputs: &Inputs,
        totals: &mut [[L::Vector; TOKEN_BLOCK]],
    ) {
        let Inputs { x, stride, count } = *inputs;
        let step = (self.len * W::SIZE).div_ceil(count.div_ceil(GROUP_TOKENS));
        let mut t = 0;
        // SAFETY: groups of tokens end at `count`; a prefetch may name any address.
        unsafe {
            let rows = rows.map(|row| row.add(self.start_bytes));
            while t < count {
                if count > GROUP_TOKENS {
                    let offset = self.start_bytes + t / GROUP_TOKENS * step;
                    for row in self.next {
                        prefetch_span::<L>(row.wrapping_add(offset), step);
                    }
                }
                let x = [0, 1, 2, 3].map(|i| x.wrapping_add((t + i) * stride));
                let totals = totals.as_mut_ptr().cast::<L::Vector>().add(t);
                match count - t {
                    1 => self.register_block::<L, W, R, 1>(rows, [x[0]], totals),
                    2 => self.register_block::<L, W, R, 2>(rows, [x[0], x[1]], totals),
                    3 => self.register_block::<L, W, R, 3>(rows, [x[0], x[1], x[2]], totals),
                    _ => self.register_block::<L, W, R, 4>(rows, x, totals),
                }
                t += GROUP_TOKENS;
            }
        }
    }

    /// `R x T` accumulators over the span, kept in `totals` (`TOKEN_BLOCK` apart) between spans.
    ///
    /// # Safety
    /// As [`Span::tokens`], for the given inputs; `totals` is valid for `R` rows of `T` vectors.
    #[inline(always)]
    unsafe fn register_block<L: Lanes, W: Weight, const R: usize, const T: usize>(
        &self,
        rows: [*const u8; R],
        x: [*const f32; T],
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
                for (t, x) in x.iter().enumerate() {
                    let x = L::load(x.add(i));
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

/// `R` rows times one token, each row read in one go.
///
/// # Safety
/// The CPU has the features of `L`; rows are valid for `k` weights and `x` for `k` floats; `out`
/// has `R` places.
#[inline(always)]
unsafe fn dot_stream<L: Lanes, W: Weight, const R: usize>(
    rows: [*const u8; R],
    x: *const f32,
    k: usize,
    out: &mut [f32],
) {
    let body = k - k % L::COUNT;
    let mut i = 0;
    // SAFETY: `i + L::COUNT <= body <= k`.
    unsafe {
        let mut totals = [L::zero(); R];
        while i < body {
            let input = L::load(x.add(i));
            for (total, row) in totals.iter_mut().zip(&rows) {
                *total = L::fma(W::load::<L>(row.add(i * W::SIZE)), input, *total);
            }
            i += L::COUNT;
        }
        for ((out, total), row) in out.iter_mut().zip(&totals).zip(&rows) {
            *out = finish::<L, W>(L::sum(*total), *row, x, body..k);
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
