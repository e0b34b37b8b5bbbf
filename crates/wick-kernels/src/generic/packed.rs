//! Dots of packed rows with all tokens.
//!
//! ```text
//! for each block of up to 4 tokens:
//!     for each row:
//!         total[block tokens] = 0                               one vector each
//!         for each group of the row:
//!             sum[block tokens] = 0
//!             for each 8 bytes, for each field of `bits` bits in them:
//!                 sum += (field - middle) * inputs              8 weights serve all tokens of the block
//!             total += scale * sum
//!         lane sums
//! ```
//! The inputs of a last group that is not whole are copied, with zeros behind them.

use super::Lanes;
use crate::packed::{packed_groups, PACKED_GROUP};

/// Tokens of a block: their sums and totals, in 16 registers with what else there is.
const BLOCK_TOKENS: usize = 4;

/// Vectors of 8 whose values come from bits.
///
/// # Safety
/// Both methods: the CPU has the ISA's features. `source` is valid for 8 bytes, at any alignment.
pub(crate) trait Fields: Lanes {
    /// Eight bytes, each in a lane of its own.
    type Bytes: Copy;

    /// Bytes from memory.
    unsafe fn load_bytes(source: *const u8) -> Self::Bytes;
    /// The bits of each byte from `shift` on that `mask` has, as a number.
    unsafe fn field(bytes: Self::Bytes, shift: u32, mask: u32) -> Self::Vector;
}

/// `out[r * tokens + t] = row r . x[t]` for the rows of `BITS` bits in `weights`.
///
/// # Safety
/// The CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn dot_panel<L: Fields, const BITS: usize>(
    weights: &[u8],
    scales: &[u8],
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    const { assert!(L::COUNT == 8 && 8 % BITS == 0) };
    assert!(tokens > 0);
    let (width, rows) = (x.len() / tokens, out.len() / tokens);
    assert!(x.len() == width * tokens && out.len() == rows * tokens);
    let groups = packed_groups(width);
    assert_eq!(weights.len(), rows * groups * PACKED_GROUP * BITS / 8);
    assert_eq!(scales.len(), rows * groups * 2);
    let rows = Rows::<BITS> {
        weights: weights.as_ptr(),
        scales: scales.as_ptr(),
        count: rows,
        groups,
    };
    let mut first = 0;
    while first < tokens {
        let inputs = &x[first * width..];
        let target = out.as_mut_ptr().wrapping_add(first);
        // SAFETY: rows were just measured; blocks of tokens lie inside `x` and `out`.
        unsafe {
            match tokens - first {
                1 => rows.dot::<L, 1>(&Inputs::new(inputs, width), target, tokens),
                2 => rows.dot::<L, 2>(&Inputs::new(inputs, width), target, tokens),
                3 => rows.dot::<L, 3>(&Inputs::new(inputs, width), target, tokens),
                _ => rows.dot::<L, 4>(&Inputs::new(inputs, width), target, tokens),
            }
        }
        first += BLOCK_TOKENS;
    }
}

/// Inputs of `T` tokens by groups.
struct Inputs<'a, const T: usize> {
    tokens: [&'a [f32]; T],
    /// What is left of each behind the whole groups, filled up with zeros.
    rest: [[f32; PACKED_GROUP]; T],
}

impl<'a, const T: usize> Inputs<'a, T> {
    /// The first `T` rows of `x` `(.., width)`.
    fn new(x: &'a [f32], width: usize) -> Self {
        let whole = width - width % PACKED_GROUP;
        let mut inputs = Self {
            tokens: [&[]; T],
            rest: [[0.0; PACKED_GROUP]; T],
        };
        for (t, x) in x.chunks(width).take(T).enumerate() {
            inputs.tokens[t] = x;
            inputs.rest[t][..width - whole].copy_from_slice(&x[whole..]);
        }
        inputs
    }

    /// The inputs of a group: [`PACKED_GROUP`] of each token.
    #[inline(always)]
    fn group(&self, group: usize) -> [*const f32; T] {
        let start = group * PACKED_GROUP;
        std::array::from_fn(|t| match self.tokens[t].get(start..start + PACKED_GROUP) {
            Some(whole) => whole.as_ptr(),
            None => self.rest[t].as_ptr(),
        })
    }
}

/// Rows of `groups` groups each.
struct Rows<const BITS: usize> {
    weights: *const u8,
    scales: *const u8,
    count: usize,
    groups: usize,
}

impl<const BITS: usize> Rows<BITS> {
    const GROUP_BYTES: usize = PACKED_GROUP * BITS / 8;

    /// Dots with `T` tokens: that of row `r` and token `t` goes to `out[r * stride + t]`.
    ///
    /// # Safety
    /// The CPU has the features of `L`; weights and scales are valid for all groups of all rows, the inputs are as
    /// wide as those, and `out` has room.
    #[inline(always)]
    unsafe fn dot<L: Fields, const T: usize>(
        &self,
        inputs: &Inputs<'_, T>,
        out: *mut f32,
        stride: usize,
    ) {
        for r in 0..self.count {
            // SAFETY: groups of row `r` lie inside the weights, and its dots inside `out`.
            unsafe {
                let mut totals = [L::zero(); T];
                for group in 0..self.groups {
                    let index = r * self.groups + group;
                    let weights = self.weights.add(index * Self::GROUP_BYTES);
                    let bits = self
                        .scales
                        .add(2 * index)
                        .cast::<[u8; 2]>()
                        .read_unaligned();
                    let scale = L::splat(L::one_f16(u16::from_le_bytes(bits)));
                    let sums = Self::group::<L, T>(weights, inputs.group(group));
                    for (total, sum) in totals.iter_mut().zip(sums) {
                        *total = L::fma(scale, sum, *total);
                    }
                }
                for (t, total) in totals.into_iter().enumerate() {
                    *out.add(r * stride + t) = L::sum(total);
                }
            }
        }
    }

    /// Sums of a group's products, before its scale.
    ///
    /// # Safety
    /// The CPU has the features of `L`; `weights` is valid for a group, each of `inputs` for [`PACKED_GROUP`] floats.
    #[inline(always)]
    unsafe fn group<L: Fields, const T: usize>(
        weights: *const u8,
        inputs: [*const f32; T],
    ) -> [L::Vector; T] {
        let mask = (1u32 << BITS) - 1;
        // SAFETY: bytes end at `GROUP_BYTES`, and inputs at `8 / BITS` times as many.
        unsafe {
            let (one, middle) = (L::splat(1.0), L::splat(mask as f32 / -2.0));
            let mut sums = [L::zero(); T];
            for byte in (0..Self::GROUP_BYTES).step_by(8) {
                let bytes = L::load_bytes(weights.add(byte));
                for field in 0..8 / BITS {
                    let codes = L::field(bytes, (field * BITS) as u32, mask);
                    let levels = L::fma(codes, one, middle);
                    for (sum, input) in sums.iter_mut().zip(&inputs) {
                        let x = L::load(input.add(field * Self::GROUP_BYTES + byte));
                        *sum = L::fma(levels, x, *sum);
                    }
                }
            }
            sums
        }
    }
}
