//! The AVX-512 instantiation: 512-bit vectors, twice the registers.
//!
//! Only the foundation set is asked for, which brings fused multiply-add and the widening of `f16`
//! (and, as everywhere, AVX2, FMA and F16C, which packed rows are left to).
//!
//! Invariants:
//! - Nothing here runs unless [`is_available`]: the table's functions are `unsafe` for that.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::avx2;
use crate::generic::{self, add, dot, Bf16, Lanes, Weight, F16, F32, I8};
use crate::kernels::{Kernels, WeightKernels};

/// The table of this ISA.
pub(crate) static KERNELS: Kernels = Kernels {
    name: "avx512f",
    dot,
    axpy,
    f32: weight_kernels::<F32>(),
    f16: weight_kernels::<F16>(),
    bf16: weight_kernels::<Bf16>(),
    i8: weight_kernels::<I8>(),
    packed: avx2::PACKED_KERNELS,
};

/// Whether this CPU has the features.
pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f") && avx2::is_available()
}

/// 512-bit vectors.
struct Avx512;

impl Lanes for Avx512 {
    const COUNT: usize = 16;
    const GROUP_TOKENS: usize = 8;

    type Vector = __m512;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the CPU has AVX-512F.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: the CPU has AVX-512F.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> __m512 {
        // SAFETY: the CPU has AVX-512F; `source` is valid for 16 floats.
        unsafe { _mm512_loadu_ps(source) }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: __m512) {
        // SAFETY: the CPU has AVX-512F; `target` is valid for 16 floats.
        unsafe { _mm512_storeu_ps(target, value) }
    }

    #[inline(always)]
    unsafe fn load_f32(source: *const u8) -> __m512 {
        // SAFETY: the CPU has AVX-512F; `source` is valid for 64 bytes, and the load is unaligned.
        unsafe { _mm512_loadu_ps(source.cast()) }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u8) -> __m512 {
        // SAFETY: the CPU has AVX-512F; `source` is valid for 32 bytes, and the load is unaligned.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(source.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u8) -> __m512 {
        // SAFETY: the CPU has AVX-512F; `source` is valid for 32 bytes, and the load is unaligned.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const u8) -> __m512 {
        // SAFETY: the CPU has AVX-512F; `source` is valid for 16 bytes, and the load is unaligned.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source.cast()))) }
    }

    #[inline(always)]
    unsafe fn one_f16(bits: u16) -> f32 {
        // SAFETY: the CPU has F16C, which AVX-512F implies.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the CPU has AVX-512F.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(value: __m512) -> f32 {
        // SAFETY: the CPU has AVX-512F.
        unsafe {
            let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(value));
            let low = _mm512_castps512_ps256(value);
            let eight = _mm256_add_ps(low, _mm256_castpd_ps(upper));
            let low = _mm256_castps256_ps128(eight);
            let four = _mm_add_ps(low, _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

/// The functions of one weight type.
const fn weight_kernels<W: Weight>() -> WeightKernels {
    WeightKernels {
        dot_panel: dot_panel::<W>,
        add_panel: add_panel::<W>,
        widen: widen::<W>,
    }
}

#[target_feature(enable = "avx512f")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: this function has the features.
    unsafe { dot::dot::<Avx512>(a, b) }
}

#[target_feature(enable = "avx512f")]
fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    // SAFETY: this function has the features.
    unsafe { generic::axpy::<Avx512>(alpha, x, y) }
}

#[target_feature(enable = "avx512f")]
fn dot_panel<W: Weight>(rows: &[&[u8]], x: &[f32], tokens: usize, out: &mut [f32]) {
    // SAFETY: this function has the features.
    unsafe { dot::dot_panel::<Avx512, W>(rows, x, tokens, out) }
}

#[target_feature(enable = "avx512f")]
fn add_panel<W: Weight>(rows: &[&[u8]], c: &[f32], columns: Range<usize>, sums: &mut [f32]) {
    // SAFETY: this function has the features.
    unsafe { add::add_panel::<Avx512, W>(rows, c, columns, sums) }
}

#[target_feature(enable = "avx512f")]
fn widen<W: Weight>(bytes: &[u8], out: &mut [f32]) {
    // SAFETY: this function has the features.
    unsafe { generic::widen::<Avx512, W>(bytes, out) }
}
