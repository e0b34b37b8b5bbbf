//! Dots of rows that are read in one go, with up to 4 tokens: memory is the limit.
//!
//! A few rows at a time go through the registers, so that their chains of fused multiply-adds hide
//! each other's latency. The hardware sees several short streams, each of which stops at the end of
//! a page, so every line is asked for [`AHEAD_BYTES`] early, at the end of the rows in the rows that
//! come next.

use super::{finish, Inputs, Lanes, Outputs, Panel, Weight};
use crate::generic::CACHE_LINE;

/// Tokens up to which rows are read in one go.
pub(super) const STREAM_TOKENS: usize = 4;

/// Rows at a time with 1 to 4 tokens: all accumulators and inputs in 16 registers.
const ROWS: [usize; STREAM_TOKENS] = [4, 4, 3, 3];

/// Bytes between the weights in use and those asked for; whole lines.
const AHEAD_BYTES: usize = 1024;

impl Panel<'_> {
    /// Dots with up to [`STREAM_TOKENS`] tokens.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `inputs` are of `k` floats, and `out` has room for the dots
    /// of all rows with all of them.
    #[inline(always)]
    pub(super) unsafe fn stream<L: Lanes, W: Weight>(&self, inputs: &Inputs, out: &Outputs) {
        let x = [0, 1, 2, 3].map(|t| inputs.x.wrapping_add(t * inputs.stride));
        // SAFETY: as this function; the inputs are as many as `count` says.
        unsafe {
            match inputs.count {
                1 => self.stream_tokens::<L, W, 1>([x[0]], out),
                2 => self.stream_tokens::<L, W, 2>([x[0], x[1]], out),
                3 => self.stream_tokens::<L, W, 3>([x[0], x[1], x[2]], out),
                _ => self.stream_tokens::<L, W, 4>(x, out),
            }
        }
    }

    /// Dots with `T` tokens.
    ///
    /// # Safety
    /// As [`Panel::stream`], with `T` inputs.
    #[inline(always)]
    unsafe fn stream_tokens<L: Lanes, W: Weight, const T: usize>(
        &self,
        x: [*const f32; T],
        out: &Outputs,
    ) {
        let mut first = 0;
        while first < self.rows.len() {
            let (rows, next) =
                self.rows[first..].split_at(ROWS[T - 1].min(self.rows.len() - first));
            let inputs = Stream { x, k: self.k, next };
            // SAFETY: as this function; the lengths of `rows` are those of the arms.
            unsafe {
                let out = out.of_row(first);
                match *rows {
                    [a, b, c, d] => inputs.dot::<L, W, 4>([a, b, c, d], &out),
                    [a, b, c] => inputs.dot::<L, W, 3>([a, b, c], &out),
                    [a, b] => inputs.dot::<L, W, 2>([a, b], &out),
                    [a] => inputs.dot::<L, W, 1>([a], &out),
                    _ => unreachable!("1 to 4 rows at a time"),
                }
            }
            first += rows.len();
        }
    }
}

/// `T` inputs of `k` floats, and the rows that come after those in use.
struct Stream<'p, const T: usize> {
    x: [*const f32; T],
    k: usize,
    next: &'p [*const u8],
}

impl<const T: usize> Stream<'_, T> {
    /// `R` rows times all inputs.
    ///
    /// # Safety
    /// The CPU has the features of `L`; rows are valid for `k` weights, inputs for `k` floats; `out`
    /// has room for `R` rows of `T`.
    #[inline(always)]
    unsafe fn dot<L: Lanes, W: Weight, const R: usize>(&self, rows: [*const u8; R], out: &Outputs) {
        let line = CACHE_LINE / W::SIZE;
        let (body, lines_end) = (self.k - self.k % L::COUNT, self.k - self.k % line);
        let turn = lines_end.saturating_sub(AHEAD_BYTES / W::SIZE);
        let here = rows.map(|row| row.wrapping_add(AHEAD_BYTES));
        let mut there = rows;
        for (there, next) in there.iter_mut().zip(self.next) {
            *there = next.wrapping_sub(turn * W::SIZE);
        }
        let mut i = 0;
        // SAFETY: vectors end at `body <= k`, and `lines_end <= body`; prefetches may name anything.
        unsafe {
            let mut totals = [[L::zero(); T]; R];
            for (end, ahead) in [(turn, here), (lines_end, there)] {
                while i < end {
                    for ahead in ahead {
                        L::prefetch(ahead.wrapping_add(i * W::SIZE));
                    }
                    for v in 0..line / L::COUNT {
                        self.step::<L, W, R>(rows, i + v * L::COUNT, &mut totals);
                    }
                    i += line;
                }
            }
            while i < body {
                self.step::<L, W, R>(rows, i, &mut totals);
                i += L::COUNT;
            }
            for (r, (row, totals)) in rows.iter().zip(&totals).enumerate() {
                for (t, (x, total)) in self.x.iter().zip(totals).enumerate() {
                    let sum = finish::<L, W>(L::sum(*total), *row, *x, body..self.k);
                    out.set(r, t, sum);
                }
            }
        }
    }

    /// Adds the products of the vector at element `i`.
    ///
    /// # Safety
    /// As [`Stream::dot`], with `i + L::COUNT <= k`.
    #[inline(always)]
    unsafe fn step<L: Lanes, W: Weight, const R: usize>(
        &self,
        rows: [*const u8; R],
        i: usize,
        totals: &mut [[L::Vector; T]; R],
    ) {
        // SAFETY: rows and inputs hold a vector from `i` on.
        unsafe {
            let mut x = [L::zero(); T];
            for (x, source) in x.iter_mut().zip(&self.x) {
                *x = L::load(source.add(i));
            }
            for (totals, row) in totals.iter_mut().zip(&rows) {
                let w = W::load::<L>(row.add(i * W::SIZE));
                for (total, x) in totals.iter_mut().zip(&x) {
                    *total = L::fma(w, *x, *total);
                }
            }
        }
    }
}
