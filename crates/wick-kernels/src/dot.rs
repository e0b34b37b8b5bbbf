//! Rows times tokens: the gate and up products, and every other linear layer.
//!
//! Output rows are cut into pieces, one piece a task; a piece walks its rows in panels of
//! [`ROW_PANEL`], gathering the row slices of a panel on the stack.
//!
//! Not here: the arithmetic (`generic::dot`).

use rayon::prelude::*;

use crate::dtype::WeightDtype;
use crate::generic::dot::ROW_PANEL;
use crate::kernels::{Kernels, PARALLEL_MADDS_MIN};

/// Tasks a thread: more balance better, fewer start faster.
const PIECES_PER_THREAD: usize = 8;

/// Rows of a piece are a multiple of this: whole register blocks of 3 and of 4 rows.
const PIECE_ROWS_MIN: usize = 12;

/// `out[r * tokens + t] = row(r) . x[t]` for `r < row_count`, `t < tokens`.
///
/// `x` is `(tokens, k)`, `out` is `(row_count, tokens)`, and `row(r)` starts with `k` weights of
/// `dtype` (bytes beyond them are not looked at). Rows are split over the current rayon pool.
/// `row` is called once a row.
///
/// # Panics
/// When `x.len()` is not a multiple of `tokens`, `out.len()` is not `row_count * tokens`, or a row
/// is shorter than `k` weights.
pub fn dot_rows<'a, R>(
    dtype: WeightDtype,
    row_count: usize,
    row: R,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) where
    R: Fn(usize) -> &'a [u8] + Sync,
{
    let rows = Rows { dtype, row: &row };
    rows.dot(Kernels::detect(), (row_count, tokens), x, out);
}

/// The left factor: weights of one type, handed out row by row.
pub(crate) struct Rows<'r, R> {
    pub(crate) dtype: WeightDtype,
    pub(crate) row: &'r R,
}

impl<'a, R> Rows<'_, R>
where
    R: Fn(usize) -> &'a [u8] + Sync,
{
    /// [`dot_rows`] on a given table; `shape` is `(row_count, tokens)`.
    pub(crate) fn dot(&self, kernels: &Kernels, shape: (usize, usize), x: &[f32], out: &mut [f32]) {
        let (row_count, tokens) = shape;
        assert_eq!(
            Some(out.len()),
            row_count.checked_mul(tokens),
            "out is (rows, tokens)"
        );
        if tokens == 0 {
            assert!(x.is_empty(), "x holds values but there are no tokens");
            return;
        }
        assert_eq!(x.len() % tokens, 0, "x is (tokens, k)");
        if row_count == 0 {
            return;
        }
        let threads = rayon::current_num_threads();
        let piece_rows = row_count
            .div_ceil(threads * PIECES_PER_THREAD)
            .next_multiple_of(PIECE_ROWS_MIN);
        let madds = row_count.saturating_mul(x.len());
        if threads == 1 || madds < PARALLEL_MADDS_MIN || piece_rows >= row_count {
            return self.dot_piece(kernels, 0, x, tokens, out);
        }
        out.par_chunks_mut(piece_rows * tokens)
            .enumerate()
            .for_each(|(i, out)| self.dot_piece(kernels, i * piece_rows, x, tokens, out));
    }

    /// The rows from `first_row` on that `out` has room for, on this thread.
    fn dot_piece(
        &self,
        kernels: &Kernels,
        first_row: usize,
        x: &[f32],
        tokens: usize,
        out: &mut [f32],
    ) {
        let kernel = kernels.of(self.dtype).dot_panel;
        let width = x.len() / tokens;
        let mut panel: [&[u8]; ROW_PANEL] = [&[]; ROW_PANEL];
        let mut next = first_row;
        for out in out.chunks_mut(ROW_PANEL * tokens) {
            let rows = self.gather(next, out.len() / tokens, width, &mut panel);
            // SAFETY: the table belongs to this CPU (`Kernels::detect`, or a test's own check).
            unsafe { kernel(rows, x, tokens, out) };
            next += rows.len();
        }
    }

    /// Fills `panel` with `count` rows from `first` on, each cut to exactly `width` weights.
    pub(crate) fn gather<'p>(
        &self,
        first: usize,
        count: usize,
        width: usize,
        panel: &'p mut [&'a [u8]],
    ) -> &'p [&'a [u8]] {
        let row_bytes = width * self.dtype.size_bytes();
        for (i, slot) in panel[..count].iter_mut().enumerate() {
            let row = (self.row)(first + i);
            assert!(
                row.len() >= row_bytes,
                "row {} has {} bytes, {width} weights of {} need {row_bytes}",
                first + i,
                row.len(),
                self.dtype.name()
            );
            *slot = &row[..row_bytes];
        }
        &panel[..count]
    }
}
