//! Packed rows times tokens: the scores of a quantised matrix.
//!
//! Output rows are cut into pieces, one piece a task. Every instruction set computes with 8 lanes in one order, so the
//! bits of a result are the same on every machine.
//!
//! Not here: the arithmetic (`generic::packed`), the layout (`packed`).

use rayon::prelude::*;

use crate::kernels::{Kernels, PARALLEL_MADDS_MIN};
use crate::packed::{packed_groups, PackedBits};

/// Tasks a thread: more balance better, fewer start faster.
const PIECES_PER_THREAD: usize = 8;

/// Rows of a piece are a multiple of this, which its tokens meet in a cache.
const PIECE_ROWS_MIN: usize = 32;

/// Packed rows of one width, side by side, and their scales.
#[derive(Clone, Copy, Debug)]
pub struct PackedRows<'a> {
    /// Bits of a weight.
    pub bits: PackedBits,
    /// Rows of [`PackedBits::row_bytes`] each.
    pub weights: &'a [u8],
    /// Little-endian f16, one for each group of each row.
    pub scales: &'a [u8],
}

impl PackedRows<'_> {
    /// `out[r * tokens + t] = row r . x[t]` for all rows that `out` has room for.
    ///
    /// `x` is `(tokens, k)`, `out` is `(rows, tokens)`. Rows are split over the current rayon pool.
    ///
    /// # Panics
    /// When `x.len()` or `out.len()` is not a multiple of `tokens`, or weights and scales are not exactly those of
    /// the rows.
    pub fn dot(&self, x: &[f32], tokens: usize, out: &mut [f32]) {
        self.dot_on(Kernels::detect(), x, tokens, out);
    }

    /// [`Self::dot`] on a given table.
    pub(crate) fn dot_on(&self, kernels: &Kernels, x: &[f32], tokens: usize, out: &mut [f32]) {
        if tokens == 0 {
            assert!(x.is_empty() && out.is_empty(), "values but no tokens");
            return;
        }
        let (width, rows) = (x.len() / tokens, out.len() / tokens);
        assert_eq!(x.len(), width * tokens, "x is (tokens, k)");
        assert_eq!(out.len(), rows * tokens, "out is (rows, tokens)");
        let (row_bytes, scale_bytes) = (self.bits.row_bytes(width), 2 * packed_groups(width));
        assert_eq!(self.weights.len(), rows * row_bytes, "weights of the rows");
        assert_eq!(self.scales.len(), rows * scale_bytes, "scales of the rows");
        if width == 0 {
            return out.fill(0.0);
        }
        let kernel = kernels.packed.of(self.bits);
        let threads = rayon::current_num_threads();
        let piece_rows = rows
            .div_ceil(threads * PIECES_PER_THREAD)
            .next_multiple_of(PIECE_ROWS_MIN);
        let few = rows.saturating_mul(x.len()) < PARALLEL_MADDS_MIN;
        let piece = |weights: &[u8], scales: &[u8], out: &mut [f32]| {
            // SAFETY: the table belongs to this CPU (`Kernels::detect`, or a test's own check).
            unsafe { kernel(weights, scales, x, tokens, out) }
        };
        if threads == 1 || few || piece_rows >= rows {
            let weights = self.weights.chunks(PIECE_ROWS_MIN * row_bytes);
            let scales = self.scales.chunks(PIECE_ROWS_MIN * scale_bytes);
            let outs = out.chunks_mut(PIECE_ROWS_MIN * tokens);
            for ((weights, scales), out) in weights.zip(scales).zip(outs) {
                piece(weights, scales, out);
            }
            return;
        }
        let weights = self.weights.par_chunks(piece_rows * row_bytes);
        let scales = self.scales.par_chunks(piece_rows * scale_bytes);
        let outs = out.par_chunks_mut(piece_rows * tokens);
        outs.zip(weights.zip(scales))
            .for_each(|(out, (weights, scales))| piece(weights, scales, out));
    }
}
