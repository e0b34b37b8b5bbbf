//! The NEON instantiation: two 128-bit vectors side by side, fused multiply-add, `f16` widening.
//!
//! Every 64-bit ARM has all of it, so there is nothing to detect. Eight lanes in the order of AVX2: results are equal
//! to its results bit for bit. Widening `f16` is written as assembly, since Rust's own intrinsics for it are not stable.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use crate::generic::packed::{self, Fields};
use crate::generic::{self, add, dot, Bf16, Lanes, Weight, F16, F32, I8};
use crate::kernels::{Kernels, PackedKernels, WeightKernels};

/// The table of this ISA.
pub(crate) static KERNELS: Kernels = Kernels {
    name: "neon",
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

/// Lanes 0 to 3 and 4 to 7.
#[derive(Clone, Copy)]
struct Pair(float32x4_t, float32x4_t);

struct Neon;

impl Lanes for Neon {
    const COUNT: usize = 8;
    // 32 registers of half a vector: as many vectors as AVX2 has.
    const GROUP_TOKENS: usize = 4;

    type Vector = Pair;

    #[inline(always)]
    unsafe fn zero() -> Pair {
        // SAFETY: the CPU has NEON.
        unsafe { Self::splat(0.0) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Pair {
        // SAFETY: the CPU has NEON.
        unsafe { Pair(vdupq_n_f32(value), vdupq_n_f32(value)) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> Pair {
        // SAFETY: the CPU has NEON; `source` is valid for 8 floats.
        unsafe { Pair(vld1q_f32(source), vld1q_f32(source.add(4))) }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: Pair) {
        // SAFETY: the CPU has NEON; `target` is valid for 8 floats.
        unsafe {
            vst1q_f32(target, value.0);
            vst1q_f32(target.add(4), value.1);
        }
    }

    #[inline(always)]
    unsafe fn load_f32(source: *const u8) -> Pair {
        // SAFETY: the CPU has NEON; `source` is valid for 32 bytes, which are loaded as bytes, at any alignment.
        unsafe {
            let (low, high) = (vld1q_u8(source), vld1q_u8(source.add(16)));
            Pair(vreinterpretq_f32_u8(low), vreinterpretq_f32_u8(high))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u8) -> Pair {
        // SAFETY: the CPU has NEON; `source` is valid for 16 bytes, at any alignment.
        unsafe { widen_f16(vreinterpretq_u16_u8(vld1q_u8(source))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u8) -> Pair {
        // SAFETY: the CPU has NEON; `source` is valid for 16 bytes, at any alignment.
        unsafe {
            let words = vreinterpretq_u16_u8(vld1q_u8(source));
            Pair(
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(words))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(words)),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const u8) -> Pair {
        // SAFETY: the CPU has NEON; `source` is valid for 8 bytes, at any alignment.
        unsafe {
            let words = vmovl_s8(vld1_s8(source.cast()));
            Pair(
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))),
                vcvtq_f32_s32(vmovl_high_s16(words)),
            )
        }
    }

    #[inline(always)]
    unsafe fn one_f16(bits: u16) -> f32 {
        // SAFETY: the CPU has NEON.
        unsafe { vgetq_lane_f32::<0>(widen_f16(vdupq_n_u16(bits)).0) }
    }

    #[inline(always)]
    unsafe fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: the CPU has NEON.
        unsafe { Pair(vfmaq_f32(c.0, a.0, b.0), vfmaq_f32(c.1, a.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn sum(value: Pair) -> f32 {
        // SAFETY: the CPU has NEON.
        unsafe {
            let four = vaddq_f32(value.0, value.1);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe {
            asm!("prfm pldl1keep, [{}]", in(reg) address, options(readonly, nostack, preserves_flags));
        }
    }
}

impl Fields for Neon {
    type Bytes = uint16x8_t;

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> uint16x8_t {
        // SAFETY: the CPU has NEON; `source` is valid for 8 bytes, at any alignment.
        unsafe { vmovl_u8(vld1_u8(source)) }
    }

    #[inline(always)]
    unsafe fn field(bytes: uint16x8_t, shift: u32, mask: u32) -> Pair {
        // SAFETY: the CPU has NEON.
        unsafe {
            // A shift to the left by a negative number is one to the right.
            let shifted = vshlq_u16(bytes, vdupq_n_s16(-(shift as i16)));
            let codes = vandq_u16(shifted, vdupq_n_u16(mask as u16));
            Pair(
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(codes))),
                vcvtq_f32_u32(vmovl_high_u16(codes)),
            )
        }
    }
}

/// Eight `f16`, given by their bits.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn widen_f16(words: uint16x8_t) -> Pair {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: both instructions are part of NEON and touch no memory.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {words:v}.4h",
            "fcvtl2 {high:v}.4s, {words:v}.8h",
            words = in(vreg) words,
            low = out(vreg) low,
            high = lateout(vreg) high,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    Pair(low, high)
}

/// The functions of one weight type.
const fn weight_kernels<W: Weight>() -> WeightKernels {
    WeightKernels {
        dot_panel: dot_panel::<W>,
        add_panel: add_panel::<W>,
        widen: widen::<W>,
    }
}

#[target_feature(enable = "neon")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: this function has the feature.
    unsafe { dot::dot::<Neon>(a, b) }
}

#[target_feature(enable = "neon")]
fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    // SAFETY: this function has the feature.
    unsafe { generic::axpy::<Neon>(alpha, x, y) }
}

#[target_feature(enable = "neon")]
fn dot_panel<W: Weight>(rows: &[&[u8]], x: &[f32], tokens: usize, out: &mut [f32]) {
    // SAFETY: this function has the feature.
    unsafe { dot::dot_panel::<Neon, W>(rows, x, tokens, out) }
}

#[target_feature(enable = "neon")]
fn add_panel<W: Weight>(rows: &[&[u8]], c: &[f32], columns: Range<usize>, sums: &mut [f32]) {
    // SAFETY: this function has the feature.
    unsafe { add::add_panel::<Neon, W>(rows, c, columns, sums) }
}

#[target_feature(enable = "neon")]
fn widen<W: Weight>(bytes: &[u8], out: &mut [f32]) {
    // SAFETY: this function has the feature.
    unsafe { generic::widen::<Neon, W>(bytes, out) }
}

#[target_feature(enable = "neon")]
fn packed_panel<const BITS: usize>(
    weights: &[u8],
    scales: &[u8],
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    // SAFETY: this function has the feature.
    unsafe { packed::dot_panel::<Neon, BITS>(weights, scales, x, tokens, out) }
}
