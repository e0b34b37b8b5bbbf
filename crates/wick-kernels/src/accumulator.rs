//! The accumulator: sums of scaled rows, the down product.
//!
//! Sums are kept by column tiles of [`TILE_COLUMNS`], `sums[tile][token][column in tile]`, so that
//! threads take whole tiles and one tile of all tokens stays in cache. With one token that is the
//! plain row, padded.
//!
//! Invariants:
//! - `sums.len() == tile_count * tokens * TILE_COLUMNS`, `tile_count = ceil(width / TILE_COLUMNS)`.
//! - Memory only grows, in [`Accumulator::reset`].
//! - Each element is a chain of fused multiply-adds in the order the rows came.
//!
//! Not here: the arithmetic (`generic::add`).

use std::ops::Range;

use rayon::prelude::*;

use crate::dot::Rows;
use crate::dtype::WeightDtype;
use crate::generic::add::{ADD_ROWS, STREAM_TOKENS, TILE_COLUMNS};
use crate::kernels::{Kernels, PARALLEL_MADDS_MIN};

/// Tasks a thread with many tokens; with few, a thread gets one piece of long row parts.
const PIECES_PER_THREAD: usize = 4;

/// Sums that stay in L2 while all rows are added to them.
const L2_FLOATS: usize = 48 * 1024;

/// `(tokens, width)` sums of `f32`, into which scaled rows are added.
///
/// ```
/// use wick_kernels::{Accumulator, WeightDtype};
/// let row: Vec<u8> = [1f32, 2.0, 3.0].iter().flat_map(|w| w.to_le_bytes()).collect();
/// let mut sums = Accumulator::new();
/// sums.reset(2, 3);
/// sums.add_rows(WeightDtype::F32, 1, |_| &row, &[10.0, -1.0]);
/// let mut out = [0f32; 6];
/// sums.write_to(&mut out);
/// assert_eq!(out, [10.0, 20.0, 30.0, -1.0, -2.0, -3.0]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Accumulator {
    sums: Vec<f32>,
    tokens: usize,
    width: usize,
}

impl Accumulator {
    /// An empty accumulator: no tokens, no memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts new sums, all zero, of `tokens` rows of `width` floats. Memory is reused.
    pub fn reset(&mut self, tokens: usize, width: usize) {
        self.tokens = tokens;
        self.width = width;
        let len = width.div_ceil(TILE_COLUMNS) * TILE_COLUMNS * tokens;
        self.sums.clear();
        self.sums.resize(len, 0.0);
    }

    /// `sums[t][c] += coefficients[r * tokens + t] * row(r)[c]`, for `r` ascending.
    ///
    /// `row(r)` starts with `width` weights of `dtype` (bytes beyond them are not looked at).
    /// Columns are split over the current rayon pool; each thread calls `row` for every row.
    ///
    /// # Panics
    /// When `coefficients.len()` is not `row_count * tokens`, or a row is shorter than `width`
    /// weights.
    pub fn add_rows<'a, R>(
        &mut self,
        dtype: WeightDtype,
        row_count: usize,
        row: R,
        coefficients: &[f32],
    ) where
        R: Fn(usize) -> &'a [u8] + Sync,
    {
        let rows = Rows { dtype, row: &row };
        self.add(Kernels::detect(), row_count, &rows, coefficients);
    }

    /// The sums, row-major `(tokens, width)`.
    ///
    /// # Panics
    /// When `out.len()` is not `tokens * width`.
    pub fn write_to(&self, out: &mut [f32]) {
        assert_eq!(Some(out.len()), self.tokens.checked_mul(self.width));
        if out.is_empty() {
            return;
        }
        for (t, out) in out.chunks_exact_mut(self.width).enumerate() {
            for (tile, out) in out.chunks_mut(TILE_COLUMNS).enumerate() {
                let start = (tile * self.tokens + t) * TILE_COLUMNS;
                out.copy_from_slice(&self.sums[start..start + out.len()]);
            }
        }
    }

    /// [`Accumulator::add_rows`] on a given table.
    pub(crate) fn add<'a, R>(
        &mut self,
        kernels: &Kernels,
        row_count: usize,
        rows: &Rows<'_, R>,
        coefficients: &[f32],
    ) where
        R: Fn(usize) -> &'a [u8] + Sync,
    {
        let (tokens, width) = (self.tokens, self.width);
        assert_eq!(
            Some(coefficients.len()),
            row_count.checked_mul(tokens),
            "coefficients are (rows, tokens)"
        );
        if self.sums.is_empty() || row_count == 0 {
            return;
        }
        let tile_count = width.div_ceil(TILE_COLUMNS);
        let threads = rayon::current_num_threads();
        let madds = coefficients.len().saturating_mul(width);
        let piece_count = if threads == 1 || madds < PARALLEL_MADDS_MIN {
            1
        } else if tokens <= STREAM_TOKENS {
            threads
        } else {
            threads * PIECES_PER_THREAD
        };
        let piece_tiles = tile_count.div_ceil(piece_count);
        let job = Job {
            kernels,
            rows,
            row_count,
            coefficients,
            width,
        };
        if piece_tiles == tile_count {
            return job.add_piece(0..width, &mut self.sums);
        }
        let piece_columns = piece_tiles * TILE_COLUMNS;
        self.sums
            .par_chunks_mut(piece_columns * tokens)
            .enumerate()
            .for_each(|(i, sums)| {
                let start = i * piece_columns;
                job.add_piece(start..width.min(start + piece_columns), sums);
            });
    }
}

/// One call of [`Accumulator::add`], shared by the threads.
struct Job<'j, 'r, R> {
    kernels: &'j Kernels,
    rows: &'j Rows<'r, R>,
    row_count: usize,
    coefficients: &'j [f32],
    width: usize,
}

impl<'a, R> Job<'_, '_, R>
where
    R: Fn(usize) -> &'a [u8] + Sync,
{
    /// All rows into the tiles of `columns`, on this thread, as many tiles at a time as fit in L2.
    fn add_piece(&self, columns: Range<usize>, sums: &mut [f32]) {
        let tokens = self.coefficients.len() / self.row_count;
        let tile_count = if tokens <= STREAM_TOKENS {
            sums.len().div_ceil(TILE_COLUMNS)
        } else {
            (L2_FLOATS / (tokens * TILE_COLUMNS)).max(1)
        };
        let step = tile_count * TILE_COLUMNS;
        for (i, sums) in sums.chunks_mut(step * tokens).enumerate() {
            let start = columns.start + i * step;
            self.add_tiles(start..columns.end.min(start + step), sums);
        }
    }

    /// All rows into the tiles of `columns`.
    fn add_tiles(&self, columns: Range<usize>, sums: &mut [f32]) {
        let kernels = self.kernels.of(self.rows.dtype);
        let tokens = self.coefficients.len() / self.row_count;
        let mut panel: [&[u8]; ADD_ROWS] = [&[]; ADD_ROWS];
        let mut first = 0;
        for coefficients in self.coefficients.chunks(ADD_ROWS * tokens) {
            let count = coefficients.len() / tokens;
            let rows = self.rows.gather(first, count, self.width, &mut panel);
            first += count;
            // SAFETY: the table belongs to this CPU (`Kernels::detect`, or a test's check).
            unsafe { (kernels.add_panel)(rows, coefficients, columns.clone(), sums) };
        }
    }
}
