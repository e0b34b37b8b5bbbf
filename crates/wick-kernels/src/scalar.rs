//! The portable instantiation: fallback, and oracle for the others.
//!
//! 8 lanes are an array, and every step is the one AVX2 takes, so results are equal to its results
//! bit for bit. On a CPU without fused multiply-add `f32::mul_add` is a library call: right,
//! but slow.

use std::ops::Range;

use half::f16;

use crate::generic::packed::{self, Fields};
use crate::generic::{self, add, dot, Bf16, Lanes, Weight, F16, F32, I8};
use crate::kernels::{Kernels, PackedKernels, WeightKernels};

/// The table of this ISA.
pub(crate) static KERNELS: Kernels = Kernels {
    name: "scalar",
    dot,
    axpy,
    f32: weight_kernels::<F32>(),
    f16: weight_kernels::<F16>(),
    bf16: weight_kernels::<Bf16>(),
    i8: weight_kernels::<I8>(),
    packed: PackedKernels {
        one: packed_panel::<1>,
        two: packed_panel::<2>,
        four: packed_panel::<4>,
    },
};

/// Lanes of the portable vector, as many as AVX2 has.
const LANES: usize = 8;

/// Lanes as an array.
struct Portable;

impl Lanes for Portable {
    const COUNT: usize = LANES;
    const GROUP_TOKENS: usize = 4;

    type Vector = [f32; LANES];

    unsafe fn zero() -> [f32; LANES] {
        [0.0; LANES]
    }

    unsafe fn splat(value: f32) -> [f32; LANES] {
        [value; LANES]
    }

    unsafe fn load(source: *const f32) -> [f32; LANES] {
        // SAFETY: `source` is valid for `LANES` floats.
        unsafe { source.cast::<[f32; LANES]>().read_unaligned() }
    }

    unsafe fn store(target: *mut f32, value: [f32; LANES]) {
        // SAFETY: `target` is valid for `LANES` floats.
        unsafe { target.cast::<[f32; LANES]>().write_unaligned(value) }
    }

    unsafe fn load_f32(source: *const u8) -> [f32; LANES] {
        // SAFETY: `source` is valid for `LANES` weights.
        unsafe { load::<F32>(source) }
    }

    unsafe fn load_f16(source: *const u8) -> [f32; LANES] {
        // SAFETY: `source` is valid for `LANES` weights.
        unsafe { load::<F16>(source) }
    }

    unsafe fn load_bf16(source: *const u8) -> [f32; LANES] {
        // SAFETY: `source` is valid for `LANES` weights.
        unsafe { load::<Bf16>(source) }
    }

    unsafe fn load_i8(source: *const u8) -> [f32; LANES] {
        // SAFETY: `source` is valid for `LANES` weights.
        unsafe { load::<I8>(source) }
    }

    unsafe fn one_f16(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32_const()
    }

    unsafe fn fma(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    unsafe fn sum(v: [f32; LANES]) -> f32 {
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }

    unsafe fn prefetch(_: *const u8) {}
}

impl Fields for Portable {
    type Bytes = [u8; LANES];

    unsafe fn load_bytes(source: *const u8) -> [u8; LANES] {
        // SAFETY: `source` is valid for `LANES` bytes.
        unsafe { source.cast::<[u8; LANES]>().read_unaligned() }
    }

    unsafe fn field(bytes: [u8; LANES], shift: u32, mask: u32) -> [f32; LANES] {
        bytes.map(|byte| (u32::from(byte) >> shift & mask) as f32)
    }
}

/// Weights one by one.
///
/// # Safety
/// `source` is valid for [`LANES`] weights.
unsafe fn load<W: Weight>(source: *const u8) -> [f32; LANES] {
    // SAFETY: `i < LANES`; the portable ISA needs no feature.
    std::array::from_fn(|i| unsafe { W::one::<Portable>(source.add(i * W::SIZE)) })
}

/// The functions of one weight type.
const fn weight_kernels<W: Weight>() -> WeightKernels {
    WeightKernels {
        dot_panel: dot_panel::<W>,
        add_panel: add_panel::<W>,
        widen: widen::<W>,
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: the portable ISA needs no feature.
    unsafe { dot::dot::<Portable>(a, b) }
}

fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    // SAFETY: the portable ISA needs no feature.
    unsafe { generic::axpy::<Portable>(alpha, x, y) }
}

fn dot_panel<W: Weight>(rows: &[&[u8]], x: &[f32], tokens: usize, out: &mut [f32]) {
    // SAFETY: the portable ISA needs no feature.
    unsafe { dot::dot_panel::<Portable, W>(rows, x, tokens, out) }
}

fn add_panel<W: Weight>(rows: &[&[u8]], c: &[f32], columns: Range<usize>, sums: &mut [f32]) {
    // SAFETY: the portable ISA needs no feature.
    unsafe { add::add_panel::<Portable, W>(rows, c, columns, sums) }
}

fn widen<W: Weight>(bytes: &[u8], out: &mut [f32]) {
    // SAFETY: the portable ISA needs no feature.
    unsafe { generic::widen::<Portable, W>(bytes, out) }
}

fn packed_panel<const BITS: usize>(
    weights: &[u8],
    scales: &[u8],
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    // SAFETY: the portable ISA needs no feature.
    unsafe { packed::dot_panel::<Portable, BITS>(weights, scales, x, tokens, out) }
}
