//! The algorithms, written once over a small vector trait.
//!
//! [`Lanes`] is what an ISA offers: vectors of `f32`, widening loads, fused multiply-add, the
//! lane sum. [`Weight`] picks the widening load of a stored type. [`dot`], [`add`] and [`packed`]
//! hold the algorithms; `scalar.rs`, `avx2.rs`, `avx512.rs` and `neon.rs` instantiate them.
//!
//! Everything is `inline(always)` and nothing here has a `target_feature`: the features come from
//! the function an ISA file wraps around it, and the bodies must melt into that function.
//!
//! Invariants:
//! - ISAs with the same number of lanes give the same bits: the lane sum is one tree for all.
//! - Loads and stores are unaligned.

pub(crate) mod add;
pub(crate) mod dot;
pub(crate) mod packed;

/// Bytes of a cache line, for prefetches.
const CACHE_LINE: usize = 64;

/// The vector operations of one ISA.
///
/// # Safety
/// Every method: the CPU has the ISA's features. Methods taking a pointer: it is valid for
/// [`Lanes::COUNT`] elements of the named type, at any alignment (for [`Lanes::prefetch`] it may
/// be any address).
pub(crate) trait Lanes {
    /// `f32` lanes of a vector; 8 or 16.
    const COUNT: usize;

    /// Tokens of a register block of dots; 4 or 8, as the number of registers allows.
    const GROUP_TOKENS: usize;

    /// [`Lanes::COUNT`] times `f32`.
    type Vector: Copy;

    /// All lanes 0.
    unsafe fn zero() -> Self::Vector;
    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self::Vector;
    /// Lanes from memory.
    unsafe fn load(source: *const f32) -> Self::Vector;
    /// Lanes to memory.
    unsafe fn store(target: *mut f32, value: Self::Vector);
    /// Lanes from little-endian `f32`.
    unsafe fn load_f32(source: *const u8) -> Self::Vector;
    /// Lanes from little-endian `f16`.
    unsafe fn load_f16(source: *const u8) -> Self::Vector;
    /// Lanes from little-endian `bf16`.
    unsafe fn load_bf16(source: *const u8) -> Self::Vector;
    /// Lanes from signed bytes.
    unsafe fn load_i8(source: *const u8) -> Self::Vector;
    /// One `f16` given by its bits.
    unsafe fn one_f16(bits: u16) -> f32;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The lane tree: halves are added until one is left; `((0+4)+(2+6)) + ((1+5)+(3+7))` for 8.
    unsafe fn sum(value: Self::Vector) -> f32;
    /// Hints that the cache line at `address` will be read.
    unsafe fn prefetch(address: *const u8);
}

/// A stored element type.
///
/// # Safety
/// Both methods: the CPU has the features of `L`; `source` is valid for [`Lanes::COUNT`] elements
/// (`load`) or one (`one`), at any alignment.
pub(crate) trait Weight {
    /// Bytes of one element.
    const SIZE: usize;
    /// [`Lanes::COUNT`] elements widened.
    unsafe fn load<L: Lanes>(source: *const u8) -> L::Vector;
    /// One element widened.
    unsafe fn one<L: Lanes>(source: *const u8) -> f32;
}

/// Weights stored as `f32`.
pub(crate) struct F32;
/// Weights stored as `f16`.
pub(crate) struct F16;
/// Weights stored as `bf16`.
pub(crate) struct Bf16;
/// Weights stored as signed bytes.
pub(crate) struct I8;

impl Weight for F32 {
    const SIZE: usize = 4;

    #[inline(always)]
    unsafe fn load<L: Lanes>(source: *const u8) -> L::Vector {
        // SAFETY: the caller's promise is the one `load_f32` asks for.
        unsafe { L::load_f32(source) }
    }

    #[inline(always)]
    unsafe fn one<L: Lanes>(source: *const u8) -> f32 {
        // SAFETY: four bytes are readable.
        f32::from_le_bytes(unsafe { source.cast::<[u8; 4]>().read_unaligned() })
    }
}

impl Weight for F16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load<L: Lanes>(source: *const u8) -> L::Vector {
        // SAFETY: the caller's promise is the one `load_f16` asks for.
        unsafe { L::load_f16(source) }
    }

    #[inline(always)]
    unsafe fn one<L: Lanes>(source: *const u8) -> f32 {
        // SAFETY: two bytes are readable, and the CPU has the features.
        unsafe {
            L::one_f16(u16::from_le_bytes(
                source.cast::<[u8; 2]>().read_unaligned(),
            ))
        }
    }
}

impl Weight for Bf16 {
    const SIZE: usize = 2;

    #[inline(always)]
    unsafe fn load<L: Lanes>(source: *const u8) -> L::Vector {
        // SAFETY: the caller's promise is the one `load_bf16` asks for.
        unsafe { L::load_bf16(source) }
    }

    #[inline(always)]
    unsafe fn one<L: Lanes>(source: *const u8) -> f32 {
        // SAFETY: two bytes are readable.
        let bits = u16::from_le_bytes(unsafe { source.cast::<[u8; 2]>().read_unaligned() });
        f32::from_bits(u32::from(bits) << 16)
    }
}

impl Weight for I8 {
    const SIZE: usize = 1;

    #[inline(always)]
    unsafe fn load<L: Lanes>(source: *const u8) -> L::Vector {
        // SAFETY: the caller's promise is the one `load_i8` asks for.
        unsafe { L::load_i8(source) }
    }

    #[inline(always)]
    unsafe fn one<L: Lanes>(source: *const u8) -> f32 {
        // SAFETY: a byte is readable.
        f32::from(unsafe { source.cast::<i8>().read() })
    }
}

/// `y[i] += alpha * x[i]`.
///
/// # Safety
/// The CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn axpy<L: Lanes>(alpha: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    let body = x.len() - x.len() % L::COUNT;
    let mut i = 0;
    // SAFETY: `i + L::COUNT <= body <= x.len() == y.len()`.
    unsafe {
        let a = L::splat(alpha);
        while i < body {
            let target = y.as_mut_ptr().add(i);
            L::store(
                target,
                L::fma(a, L::load(x.as_ptr().add(i)), L::load(target)),
            );
            i += L::COUNT;
        }
    }
    for (y, x) in y[body..].iter_mut().zip(&x[body..]) {
        *y = alpha.mul_add(*x, *y);
    }
}

/// Stored weights to `f32`.
///
/// # Safety
/// The CPU has the features of `L`.
#[inline(always)]
pub(crate) unsafe fn widen<L: Lanes, W: Weight>(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * W::SIZE);
    // SAFETY: `bytes` holds `out.len()` weights.
    unsafe { widen_raw::<L, W>(bytes.as_ptr(), out.len(), out.as_mut_ptr()) }
}

/// `count` stored weights to `f32`.
///
/// # Safety
/// The CPU has the features of `L`; `source` is valid for `count` weights, `target` for `count`
/// floats.
#[inline(always)]
unsafe fn widen_raw<L: Lanes, W: Weight>(source: *const u8, count: usize, target: *mut f32) {
    let body = count - count % L::COUNT;
    let mut i = 0;
    // SAFETY: `i + L::COUNT <= body <= count` in the first loop, `i < count` in the second.
    unsafe {
        while i < body {
            L::store(target.add(i), W::load::<L>(source.add(i * W::SIZE)));
            i += L::COUNT;
        }
        while i < count {
            *target.add(i) = W::one::<L>(source.add(i * W::SIZE));
            i += 1;
        }
    }
}

/// Hints that the cache lines of `len` bytes from `start` on will be read; any address will do.
///
/// # Safety
/// The CPU has the features of `L`.
#[inline(always)]
unsafe fn prefetch_span<L: Lanes>(start: *const u8, len: usize) {
    let mut at = 0;
    while at < len {
        // SAFETY: a prefetch may name any address.
        unsafe { L::prefetch(start.wrapping_add(at)) };
        at += CACHE_LINE;
    }
}
