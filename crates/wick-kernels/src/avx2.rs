//! The AVX2 instantiation: 256-bit vectors, fused multiply-add, hardware `f16` widening.
//!
//! Invariants:
//! - Nothing here runs unless [`is_available`]: the table's functions are `unsafe` for that.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::generic::packed::{self, Fields};
use crate::generic::{self, add, dot, Bf16, Lanes, Weight, F16, F32, I8};
use crate::kernels::{Kernels, PackedKernels, WeightKernels};

/// The table of this ISA.
pub(crate) static KERNELS: Kernels = Kernels {
    name: "avx2+fma+f16c",
    dot,
    axpy,
    f32: weight_kernels::<F32>(),
    f16: weight_kernels::<F16>(),
    bf16: weight_kernels::<Bf16>(),
    i8: weight_kernels::<I8>(),
    packed: PACKED_KERNELS,
};

/// The kernels of packed rows, for AVX-512 too: they have 8 lanes everywhere.
pub(crate) const PACKED_KERNELS: PackedKernels = PackedKernels {
    one: packed_panel::<1>,
    two: packed_panel::<2>,
    four: packed_panel::<4>,
};

/// Whether this CPU has the features.
pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// The byte shuffle that makes `bf16` into `f32`: the words 0..4 (first half) and 4..8 (second
/// half) of 16 bytes become the upper halves of 4 floats each. One shuffle instead of a widening
/// move and a shift, which would take the ports of fma.
const UPPER_HALVES: [i8; 32] = {
    let mut shuffle = [-1; 32];
    let mut float = 0;
    while float < 8 {
        shuffle[4 * float + 2] = 2 * float as i8;
        shuffle[4 * float + 3] = 2 * float as i8 + 1;
        float += 1;
    }
    shuffle
};

/// 256-bit vectors.
struct Avx2;

impl Lanes for Avx2 {
    const COUNT: usize = 8;
    const GROUP_TOKENS: usize = 4;

    type Vector = __m256;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: the CPU has AVX.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        // SAFETY: the CPU has AVX.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> __m256 {
        // SAFETY: the CPU has AVX; `source` is valid for 8 floats.
        unsafe { _mm256_loadu_ps(source) }
    }

    #[inline(always)]
    unsafe fn store(target: *mut f32, value: __m256) {
        // SAFETY: the CPU has AVX; `target` is valid for 8 floats.
        unsafe { _mm256_storeu_ps(target, value) }
    }

    #[inline(always)]
    unsafe fn load_f32(source: *const u8) -> __m256 {
        // SAFETY: the CPU has AVX; `source` is valid for 32 bytes, and the load is unaligned.
        unsafe { _mm256_loadu_ps(source.cast()) }
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u8) -> __m256 {
        // SAFETY: the CPU has F16C; `source` is valid for 16 bytes, and the load is unaligned.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(source.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u8) -> __m256 {
        // SAFETY: the CPU has AVX2; `source` is valid for 16 bytes, and the load is unaligned.
        unsafe {
            let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(source.cast()));
            let upper_halves = _mm256_loadu_si256(UPPER_HALVES.as_ptr().cast());
            _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, upper_halves))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(source: *const u8) -> __m256 {
        // SAFETY: the CPU has AVX2; `source` is valid for 8 bytes, and the load is unaligned.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(source.cast()))) }
    }

    #[inline(always)]
    unsafe fn one_f16(bits: u16) -> f32 {
        // SAFETY: the CPU has F16C.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the CPU has FMA.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(value: __m256) -> f32 {
        // SAFETY: the CPU has AVX.
        unsafe {
            let low = _mm256_castps256_ps128(value);
            let four = _mm_add_ps(low, _mm256_extractf128_ps::<1>(value));
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

impl Fields for Avx2 {
    type Bytes = __m256i;

    #[inline(always)]
    unsafe fn load_bytes(source: *const u8) -> __m256i {
        // SAFETY: the CPU has AVX2; `source` is valid for 8 bytes, and the load is unaligned.
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(source.cast())) }
    }

    #[inline(always)]
    unsafe fn field(bytes: __m256i, shift: u32, mask: u32) -> __m256 {
        // SAFETY: the CPU has AVX2.
        unsafe {
            let shifted = _mm256_srlv_epi32(bytes, _mm256_set1_epi32(shift as i32));
            _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(mask as i32)))
        }
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

#[target_feature(enable = "avx2,fma,f16c")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: this function has the features.
    unsafe { dot::dot::<Avx2>(a, b) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    // SAFETY: this function has the features.
    unsafe { generic::axpy::<Avx2>(alpha, x, y) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dot_panel<W: Weight>(rows: &[&[u8]], x: &[f32], tokens: usize, out: &mut [f32]) {
    // SAFETY: this function has the features.
    unsafe { dot::dot_panel::<Avx2, W>(rows, x, tokens, out) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add_panel<W: Weight>(rows: &[&[u8]], c: &[f32], columns: Range<usize>, sums: &mut [f32]) {
    // SAFETY: this function has the features.
    unsafe { add::add_panel::<Avx2, W>(rows, c, columns, sums) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn widen<W: Weight>(bytes: &[u8], out: &mut [f32]) {
    // SAFETY: this function has the features.
    unsafe { generic::widen::<Avx2, W>(bytes, out) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn packed_panel<const BITS: usize>(
    weights: &[u8],
    scales: &[u8],
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    // SAFETY: this function has the features.
    unsafe { packed::dot_panel::<Avx2, BITS>(weights, scales, x, tokens, out) }
}
