//! Slices to slices: the dot and axpy kernels of sparse feed-forward layers.
//!
//! A feed-forward layer needs two products. Gate and up are dots: `out[r][t] = row(r) . x[t]`
//! ([`dot_rows`]). Down is a sum of scaled rows: `y[t] += sum over r of c[r][t] * row(r)`
//! ([`Accumulator`]). Rows are little-endian `f32`, `f16`, `bf16` or `i8` bytes at any alignment
//! ([`WeightDtype`]), wherever they lie: the caller hands out one slice a row. Inputs, sums and
//! outputs are `f32`. Predictors have rows of 1, 2 or 4 bits a weight as well ([`PackedRows`]),
//! made by [`pack_row`]. [`dot()`] and [`axpy`] are the same two operations on plain `f32` slices, and
//! [`widen`] turns stored weights into `f32`. [`read_plain`] and [`read_streams`] only read: the
//! floor to time the others against.
//!
//! Invariants:
//! - A dot is one vector accumulator of `L` lanes, fused multiply-adds in ascending position, then
//!   the lane tree (halves are added until one is left: `((0+4)+(2+6)) + ((1+5)+(3+7))` for 8), then
//!   the last `k % L` elements one by one. `L` is 16 with AVX-512 and 8 otherwise: a process stays
//!   with one instruction set, but two machines may differ in the last bits of a dot.
//! - A dot of a packed row has 8 lanes everywhere: a vector sum a group of 64, added to the row's with
//!   one fused multiply-add by the group's scale, then the lane tree.
//! - An element of a sum of rows is a chain of fused multiply-adds in ascending row order.
//! - So the bits of a result do not depend on how rows are grouped into calls, on how many tokens
//!   share a call, on tile sizes, or on the number of threads. Threads split outputs, never a sum.
//! - Nothing is allocated but by [`Accumulator::reset`], and there only to grow (rayon's own queue
//!   aside, when the caller is not one of its threads).
//! - Infinities and NaNs follow IEEE 754; no input value panics. Wrong lengths panic.
//!
//! Work is split over the current rayon pool when it exceeds about 64 Ki multiply-adds.
//!
//! Not here: which rows are needed (`candle-wick`), reading them (`wick-io`).
//!
//! ```
//! use wick_kernels::{dot_rows, WeightDtype};
//! let rows: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|w| w.to_le_bytes()).collect();
//! let mut out = [0f32; 2];
//! dot_rows(WeightDtype::F32, 2, |r| &rows[8 * r..8 * (r + 1)], &[10.0, 1.0], 1, &mut out);
//! assert_eq!(out, [12.0, 34.0]);
//! ```

mod accumulator;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dot;
mod dtype;
mod generic;
mod kernels;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed;
mod packed_dot;
mod plain;
mod read;
mod scalar;
#[cfg(test)]
mod tests;

pub use accumulator::Accumulator;
pub use dot::dot_rows;
pub use dtype::WeightDtype;
pub use kernels::isa_name;
pub use packed::{pack_row, packed_groups, PackedBits, PACKED_GROUP};
pub use packed_dot::PackedRows;
pub use plain::{axpy, dot, widen};
pub use read::{read_plain, read_streams};
