//! The obvious versions, and matrices to try them on.

use half::{bf16, f16};

use crate::accumulator::Accumulator;
use crate::dot::Rows;
use crate::kernels::Kernels;
use crate::WeightDtype;

/// A `(rows, width)` matrix whose rows lie at odd addresses, with other bytes between them.
pub(super) struct Matrix {
    pub(super) dtype: WeightDtype,
    pub(super) rows: usize,
    pub(super) width: usize,
    bytes: Vec<u8>,
}

impl Matrix {
    /// Values in -1..1 from a seed.
    pub(super) fn random(dtype: WeightDtype, rows: usize, width: usize, seed: u64) -> Self {
        Self::of(dtype, width, &random(rows * width, seed), rows)
    }

    /// The given values, rounded to `dtype`.
    pub(super) fn of(dtype: WeightDtype, width: usize, values: &[f32], rows: usize) -> Self {
        let stride = width * dtype.size_bytes() + 3;
        let mut bytes = vec![0xffu8; rows * stride + 1];
        for r in 0..rows {
            for c in 0..width {
                let encoded = encode(dtype, values[r * width + c]);
                let at = 1 + r * stride + c * dtype.size_bytes();
                bytes[at..at + encoded.len()].copy_from_slice(&encoded);
            }
        }
        Self {
            dtype,
            rows,
            width,
            bytes,
        }
    }

    /// The bytes of row `r`, and three bytes that are not its own.
    pub(super) fn row(&self, r: usize) -> &[u8] {
        let stride = self.width * self.dtype.size_bytes() + 3;
        &self.bytes[1 + r * stride..1 + (r + 1) * stride]
    }

    /// The weight at `(r, c)`.
    pub(super) fn at(&self, r: usize, c: usize) -> f32 {
        let row = self.row(r);
        match self.dtype {
            WeightDtype::F32 => f32::from_le_bytes(row[4 * c..4 * c + 4].try_into().unwrap()),
            WeightDtype::F16 => f16::from_le_bytes([row[2 * c], row[2 * c + 1]]).to_f32(),
            WeightDtype::Bf16 => bf16::from_le_bytes([row[2 * c], row[2 * c + 1]]).to_f32(),
            WeightDtype::I8 => f32::from(row[c] as i8),
        }
    }

    /// `dot_rows` on one table.
    pub(super) fn dot(&self, kernels: &Kernels, x: &[f32], tokens: usize) -> Vec<f32> {
        self.dot_part(kernels, 0..self.rows, x, tokens)
    }

    /// `dot_rows` of the rows `range` on one table.
    pub(super) fn dot_part(
        &self,
        kernels: &Kernels,
        range: std::ops::Range<usize>,
        x: &[f32],
        tokens: usize,
    ) -> Vec<f32> {
        let mut out = vec![7.0; range.len() * tokens];
        let rows = Rows {
            dtype: self.dtype,
            row: &|r| self.row(range.start + r),
        };
        rows.dot(kernels, (range.len(), tokens), x, &mut out);
        out
    }

    /// `add_rows` of the rows `range` on one table.
    pub(super) fn add(
        &self,
        kernels: &Kernels,
        range: std::ops::Range<usize>,
        coefficients: &[f32],
        sums: &mut Accumulator,
    ) {
        let rows = Rows {
            dtype: self.dtype,
            row: &|r| self.row(range.start + r),
        };
        sums.add(kernels, range.len(), &rows, coefficients);
    }

    /// All rows added to fresh sums, read back.
    pub(super) fn add_all(
        &self,
        kernels: &Kernels,
        tokens: usize,
        coefficients: &[f32],
    ) -> Vec<f32> {
        let mut sums = Accumulator::new();
        sums.reset(tokens, self.width);
        self.add(kernels, 0..self.rows, coefficients, &mut sums);
        read(&sums, tokens * self.width)
    }
}

/// The accumulator's sums.
pub(super) fn read(sums: &Accumulator, len: usize) -> Vec<f32> {
    let mut out = vec![7.0; len];
    sums.write_to(&mut out);
    out
}

/// One weight's bytes.
pub(super) fn encode(dtype: WeightDtype, value: f32) -> Vec<u8> {
    match dtype {
        WeightDtype::F32 => value.to_le_bytes().to_vec(),
        WeightDtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        WeightDtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        // From -1 to 1, as random values are: all of the range.
        WeightDtype::I8 => vec![(value * 128.0) as i8 as u8],
    }
}

/// Values in -1..1 (splitmix64).
pub(super) fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

/// A dot in the order the crate promises: `lanes` of them, the lane tree, the rest.
pub(super) fn dot_in_order(lanes: usize, w: &[f32], x: &[f32]) -> f32 {
    let mut totals = vec![0f32; lanes];
    let body = w.len() / lanes * lanes;
    for i in 0..body {
        totals[i % lanes] = w[i].mul_add(x[i], totals[i % lanes]);
    }
    while totals.len() > 1 {
        let upper = totals.split_off(totals.len() / 2);
        for (total, upper) in totals.iter_mut().zip(upper) {
            *total += upper;
        }
    }
    (body..w.len()).fold(totals[0], |sum, i| w[i].mul_add(x[i], sum))
}

/// Equal bits, any NaN being equal to any other.
pub(super) fn assert_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
        assert!(same, "{what}: element {i} is {got:e}, expected {want:e}");
    }
}
