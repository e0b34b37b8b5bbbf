//! Sums of scaled rows.
//!
//! Up to 4 tokens, memory is the limit: 4 rows (2 with 3 or 4 tokens) at a time are read along the
//! columns, each line asked for early; a sum is loaded, gets its products in row order, and is
//! stored. More tokens:
//! ```text
//! for each tile of TILE_COLUMNS columns:
//!     widen the rows' part of the tile side by side       (rows, TILE_COLUMNS) floats, in L1
//!     for each group of 6 tokens, for each group of 2 vectors:
//!         12 sums in registers over all rows; a widened weight serves 6 tokens
//! ```
//! A tile is too short for the hardware to see a stream, so the next one is prefetched.
//!
//! Invariants:
//! - Sums beyond the columns (in the last vector of the last tile) hold anything; they are never
//!   handed out.

use std::ops::Range;

use super::{prefetch_span, widen_raw, Lanes, Weight};

/// Columns of a tile: whole register blocks.
pub(crate) const TILE_COLUMNS: usize = 96;

/// Rows of one call.
pub(crate) const ADD_ROWS: usize = 32;

/// Tokens up to which rows are read along the columns.
pub(crate) const STREAM_TOKENS: usize = 4;

/// Tokens and vectors of a register block: 6 x 2 sums + 2 weights + 1 coefficient = 15 registers.
const GROUP_TOKENS: usize = 6;
const GROUP_VECTORS: usize = 2;

/// Bytes between the weights in use and those asked for, when rows are read along the columns.
const AHEAD_BYTES: usize = 1024;

/// Lanes up to 16 fill tiles and spans without a rest.
const _: () = assert!(TILE_COLUMNS.is_multiple_of(GROUP_VECTORS * 16));

/// `sums[t][c] += coefficients[r][t] * rows[r][columns.start + c]` for `c < columns.len()`.
///
/// `coefficients` is `(rows, tokens)`; `sums` is `(tiles, tokens, TILE_COLUMNS)`.
///
/// # Safety
/// The CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn add_panel<L: Lanes, W: Weight>(
    rows: &[&[u8]],
    coefficients: &[f32],
    columns: Range<usize>,
    sums: &mut [f32],
) {
    assert!(!rows.is_empty() && rows.len() <= ADD_ROWS && columns.start <= columns.end);
    let tokens = coefficients.len() / rows.len();
    assert_eq!(coefficients.len(), rows.len() * tokens);
    let tile_count = columns.len().div_ceil(TILE_COLUMNS);
    assert_eq!(sums.len(), tile_count * tokens * TILE_COLUMNS);
    let mut pointers = [std::ptr::null(); ADD_ROWS];
    for (pointer, row) in pointers.iter_mut().zip(rows) {
        assert!(row.len() / W::SIZE >= columns.end);
        *pointer = row[columns.start * W::SIZE..].as_ptr();
    }
    let panel = Panel {
        rows: &pointers[..rows.len()],
        columns: columns.len(),
        coefficients,
        tokens,
    };
    // SAFETY: rows hold the columns, `sums` the tiles; the arms name the number of tokens.
    unsafe {
        match tokens {
            0 => (),
            1 => panel.stream::<L, W, 1>(4, sums),
            2 => panel.stream::<L, W, 2>(4, sums),
            3 => panel.stream::<L, W, 3>(2, sums),
            STREAM_TOKENS => panel.stream::<L, W, 4>(2, sums),
            _ => panel.tiles::<L, W>(sums),
        }
    }
}

/// Rows of one call, each pointer valid for `columns` weights, and `coefficients[row][token]`.
struct Panel<'p> {
    rows: &'p [*const u8],
    columns: usize,
    coefficients: &'p [f32],
    tokens: usize,
}

/// Widened weights of one tile, `(ADD_ROWS, TILE_COLUMNS)`.
#[repr(align(64))]
struct Packed([f32; ADD_ROWS * TILE_COLUMNS]);

impl Panel<'_> {
    /// Adds all rows for `T == tokens` tokens, up to 4 of them at a time.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `sums` holds all tiles.
    #[inline(always)]
    unsafe fn stream<L: Lanes, W: Weight, const T: usize>(
        &self,
        rows_at_once: usize,
        sums: &mut [f32],
    ) {
        let groups = self.rows.chunks(rows_at_once);
        let (coefficients, _) = self.coefficients.as_chunks::<T>();
        for (i, (rows, c)) in groups.zip(coefficients.chunks(rows_at_once)).enumerate() {
            let next = &self.rows[i * rows_at_once + rows.len()..];
            // SAFETY: as this function; the lengths are those of the arms.
            unsafe {
                match (rows, c) {
                    (&[r0, r1, r2, r3], &[c0, c1, c2, c3]) => {
                        let rows = [r0, r1, r2, r3];
                        self.stream_rows::<L, W, 4, T>(rows, next, [c0, c1, c2, c3], sums);
                    }
                    (&[r0, r1, r2], &[c0, c1, c2]) => {
                        self.stream_rows::<L, W, 3, T>([r0, r1, r2], next, [c0, c1, c2], sums);
                    }
                    (&[r0, r1], &[c0, c1]) => {
                        self.stream_rows::<L, W, 2, T>([r0, r1], next, [c0, c1], sums);
                    }
                    (&[r0], &[c0]) => self.stream_rows::<L, W, 1, T>([r0], next, [c0], sums),
                    _ => unreachable!("chunks are of 1 to 4 rows"),
                }
            }
        }
    }

    /// Adds `R` rows in their order; `next` are those that come after them.
    ///
    /// # Safety
    /// As [`Panel::stream`].
    #[inline(always)]
    unsafe fn stream_rows<L: Lanes, W: Weight, const R: usize, const T: usize>(
        &self,
        rows: [*const u8; R],
        next: &[*const u8],
        coefficients: [[f32; T]; R],
        sums: &mut [f32],
    ) {
        let turn = self.columns.saturating_sub(AHEAD_BYTES / W::SIZE);
        let mut there = rows;
        for (there, next) in there.iter_mut().zip(next) {
            *there = next.wrapping_sub(turn * W::SIZE);
        }
        // SAFETY: tiles end at `columns`; prefetches may name anything.
        unsafe {
            let mut c = [[L::zero(); T]; R];
            for (c, coefficients) in c.iter_mut().zip(&coefficients) {
                for (c, coefficient) in c.iter_mut().zip(coefficients) {
                    *c = L::splat(*coefficient);
                }
            }
            for (i, sums) in sums.chunks_exact_mut(T * TILE_COLUMNS).enumerate() {
                let column = i * TILE_COLUMNS;
                let len = TILE_COLUMNS.min(self.columns - column);
                let body = len - len % L::COUNT;
                for (row, there) in rows.iter().zip(&there) {
                    let ahead = if column < turn {
                        row.wrapping_add(AHEAD_BYTES)
                    } else {
                        *there
                    };
                    prefetch_span::<L>(
                        ahead.wrapping_add(column * W::SIZE),
                        TILE_COLUMNS * W::SIZE,
                    );
                }
                let rows = rows.map(|row| row.add(column * W::SIZE));
                stream_tile::<L, W, R, T>(rows, &c, body, sums.as_mut_ptr());
                for i in body..len {
                    for (c, row) in coefficients.iter().zip(&rows) {
                        let w = W::one::<L>(row.add(i * W::SIZE));
                        for (t, c) in c.iter().enumerate() {
                            let sum = &mut sums[t * TILE_COLUMNS + i];
                            *sum = c.mul_add(w, *sum);
                        }
                    }
                }
            }
        }
    }

    /// Adds all rows tile by tile.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `sums` holds all tiles.
    #[inline(always)]
    unsafe fn tiles<L: Lanes, W: Weight>(&self, sums: &mut [f32]) {
        let mut packed = Packed([0.0; ADD_ROWS * TILE_COLUMNS]);
        for (tile, sums) in sums.chunks_mut(self.tokens * TILE_COLUMNS).enumerate() {
            let start = tile * TILE_COLUMNS;
            let columns = TILE_COLUMNS.min(self.columns - start);
            // SAFETY: rows hold `start + columns` weights; `packed` has room for a tile of each.
            unsafe {
                for (row, packed) in self.rows.iter().zip(packed.0.chunks_mut(TILE_COLUMNS)) {
                    let source = row.add(start * W::SIZE);
                    let bytes = TILE_COLUMNS * W::SIZE;
                    prefetch_span::<L>(source.wrapping_add(bytes), bytes);
                    widen_raw::<L, W>(source, columns, packed.as_mut_ptr());
                }
                self.tile::<L>(&packed, columns.div_ceil(L::COUNT), sums.as_mut_ptr());
            }
        }
    }

    /// Adds the packed rows to the sums of one tile, `vectors` of its width.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `sums` is valid for `(tokens, TILE_COLUMNS)`.
    #[inline(always)]
    unsafe fn tile<L: Lanes>(&self, packed: &Packed, vectors: usize, sums: *mut f32) {
        let mut t = 0;
        while t < self.tokens {
            // SAFETY: groups of tokens end at `tokens`.
            unsafe {
                let sums = sums.add(t * TILE_COLUMNS);
                match self.tokens - t {
                    1 => self.tile_tokens::<L, 1>(packed, t, vectors, sums),
                    2 => self.tile_tokens::<L, 2>(packed, t, vectors, sums),
                    3 => self.tile_tokens::<L, 3>(packed, t, vectors, sums),
                    4 => self.tile_tokens::<L, 4>(packed, t, vectors, sums),
                    5 => self.tile_tokens::<L, 5>(packed, t, vectors, sums),
                    _ => self.tile_tokens::<L, 6>(packed, t, vectors, sums),
                }
            }
            t += GROUP_TOKENS;
        }
    }

    /// The part of `T` tokens from `first` on.
    ///
    /// # Safety
    /// As [`Panel::tile`], with `sums` valid for `(T, TILE_COLUMNS)` and `first + T <= tokens`.
    #[inline(always)]
    unsafe fn tile_tokens<L: Lanes, const T: usize>(
        &self,
        packed: &Packed,
        first: usize,
        vectors: usize,
        sums: *mut f32,
    ) {
        let mut v = 0;
        // SAFETY: groups of vectors end at `vectors`; `first` is inside every row of coefficients.
        unsafe {
            let block = Block {
                packed: packed.0.as_ptr(),
                rows: self.rows.len(),
                coefficients: self.coefficients.as_ptr().add(first),
                tokens: self.tokens,
            };
            while v < vectors {
                match vectors - v {
                    1 => block.add::<L, T, 1>(v * L::COUNT, sums),
                    _ => block.add::<L, T, 2>(v * L::COUNT, sums),
                }
                v += GROUP_VECTORS;
            }
        }
    }
}

/// Adds the first `len` columns of `R` rows, in their order, to the sums of a tile.
///
/// # Safety
/// The CPU has the features of `L`; rows are valid for `len` weights, which are whole vectors of a
/// tile; `sums` is valid for `(T, TILE_COLUMNS)`.
#[inline(always)]
unsafe fn stream_tile<L: Lanes, W: Weight, const R: usize, const T: usize>(
    rows: [*const u8; R],
    c: &[[L::Vector; T]; R],
    len: usize,
    sums: *mut f32,
) {
    let mut i = 0;
    while i < len {
        // SAFETY: `i + L::COUNT <= len <= TILE_COLUMNS`.
        unsafe {
            let w = rows.map(|row| W::load::<L>(row.add(i * W::SIZE)));
            for t in 0..T {
                let target = sums.add(t * TILE_COLUMNS + i);
                let mut sum = L::load(target);
                for (c, w) in c.iter().zip(&w) {
                    sum = L::fma(c[t], *w, sum);
                }
                L::store(target, sum);
            }
        }
        i += L::COUNT;
    }
}

/// Factors of a register block: `packed[rows][TILE_COLUMNS]`, `coefficients[rows][tokens]`.
struct Block {
    packed: *const f32,
    rows: usize,
    coefficients: *const f32,
    tokens: usize,
}

impl Block {
    /// `T x V` sums from `column` on over all rows, in registers.
    ///
    /// # Safety
    /// The CPU has the features of `L`; the pointers are valid for their shapes (`coefficients` for
    /// `T` of a row); `sums` is valid for `(T, TILE_COLUMNS)`; `V` vectors from `column` on are
    /// inside a tile.
    #[inline(always)]
    unsafe fn add<L: Lanes, const T: usize, const V: usize>(&self, column: usize, sums: *mut f32) {
        // SAFETY: all offsets are inside the shapes that the caller vouches for.
        unsafe {
            let mut totals = [[L::zero(); V]; T];
            for (t, totals) in totals.iter_mut().enumerate() {
                for (v, total) in totals.iter_mut().enumerate() {
                    *total = L::load(sums.add(t * TILE_COLUMNS + column + v * L::COUNT));
                }
            }
            for r in 0..self.rows {
                let mut w = [L::zero(); V];
                for (v, w) in w.iter_mut().enumerate() {
                    *w = L::load(self.packed.add(r * TILE_COLUMNS + column + v * L::COUNT));
                }
                let c = self.coefficients.add(r * self.tokens);
                for (t, totals) in totals.iter_mut().enumerate() {
                    let c = L::splat(*c.add(t));
                    for (total, w) in totals.iter_mut().zip(&w) {
                        *total = L::fma(c, *w, *total);
                    }
                }
            }
            for (t, totals) in totals.iter().enumerate() {
                for (v, total) in totals.iter().enumerate() {
                    L::store(sums.add(t * TILE_COLUMNS + column + v * L::COUNT), *total);
                }
            }
        }
    }
}
