//! The dispatch table: one set of function pointers an ISA, chosen at run time.
//!
//! The pointers are `unsafe` for one reason only: the CPU must have the ISA's features. Lengths
//! are asserted inside the kernels, next to the code that relies on them.
//!
//! Invariants:
//! - [`Kernels::detect`] returns a table only when the CPU it runs on has the table's features, and
//!   the same one for the life of the process.

use std::env;
use std::ops::Range;
use std::sync::OnceLock;

use crate::dtype::WeightDtype;
use crate::packed::PackedBits;

/// Multiply-adds below which handing work to other threads costs more than it saves.
pub(crate) const PARALLEL_MADDS_MIN: usize = 64 * 1024;

/// The environment variable that asks for an instruction set, by the start of its name.
pub(crate) const ISA_VARIABLE: &str = "WICK_ISA";

/// `(rows, x, tokens, out)`: `out[r * tokens + t] = rows[r] . x[t]`.
pub(crate) type DotPanel = unsafe fn(&[&[u8]], &[f32], usize, &mut [f32]);

/// `(rows, coefficients, columns, sums)`: `sums[t][c] += coefficients[r][t] * rows[r][columns][c]`.
pub(crate) type AddPanel = unsafe fn(&[&[u8]], &[f32], Range<usize>, &mut [f32]);

/// `(bytes, out)`: stored weights to `f32`.
pub(crate) type Widen = unsafe fn(&[u8], &mut [f32]);

/// The kernels of one weight type on one ISA.
pub(crate) struct WeightKernels {
    pub(crate) dot_panel: DotPanel,
    pub(crate) add_panel: AddPanel,
    pub(crate) widen: Widen,
}

/// `(weights, scales, x, tokens, out)`: `out[r * tokens + t] = packed row r . x[t]`.
pub(crate) type PackedPanel = unsafe fn(&[u8], &[u8], &[f32], usize, &mut [f32]);

/// The kernels of packed rows on one ISA, which has 8 lanes for them whatever it has elsewhere.
pub(crate) struct PackedKernels {
    pub(crate) one: PackedPanel,
    pub(crate) two: PackedPanel,
    pub(crate) four: PackedPanel,
}

impl PackedKernels {
    /// The kernel for weights of so many bits.
    pub(crate) fn of(&self, bits: PackedBits) -> PackedPanel {
        match bits {
            PackedBits::One => self.one,
            PackedBits::Two => self.two,
            PackedBits::Four => self.four,
        }
    }
}

/// The kernels of one ISA.
pub(crate) struct Kernels {
    pub(crate) name: &'static str,
    pub(crate) dot: unsafe fn(&[f32], &[f32]) -> f32,
    pub(crate) axpy: unsafe fn(f32, &[f32], &mut [f32]),
    pub(crate) f32: WeightKernels,
    pub(crate) f16: WeightKernels,
    pub(crate) bf16: WeightKernels,
    pub(crate) i8: WeightKernels,
    pub(crate) packed: PackedKernels,
}

impl Kernels {
    /// The tables this CPU can run, slowest first.
    pub(crate) fn available() -> impl Iterator<Item = &'static Self> {
        #[cfg(target_arch = "x86_64")]
        let vectors = [
            crate::avx2::is_available().then_some(&crate::avx2::KERNELS),
            crate::avx512::is_available().then_some(&crate::avx512::KERNELS),
        ];
        #[cfg(target_arch = "aarch64")]
        let vectors = [Some(&crate::neon::KERNELS)];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let vectors: [Option<&Self>; 0] = [];
        std::iter::once(&crate::scalar::KERNELS).chain(vectors.into_iter().flatten())
    }

    /// The table in use: the one [`ISA_VARIABLE`] asks for, or else the fastest.
    pub(crate) fn detect() -> &'static Self {
        static IN_USE: OnceLock<&Kernels> = OnceLock::new();
        IN_USE.get_or_init(|| Self::choose(&env::var(ISA_VARIABLE).unwrap_or_default()))
    }

    /// The available table whose name starts with `wanted`, or else the fastest.
    pub(crate) fn choose(wanted: &str) -> &'static Self {
        Self::available()
            .find(|kernels| !wanted.is_empty() && kernels.name.starts_with(wanted))
            .or_else(|| Self::available().last())
            .unwrap_or(&crate::scalar::KERNELS)
    }

    /// The kernels for weights stored as `dtype`.
    pub(crate) fn of(&self, dtype: WeightDtype) -> &WeightKernels {
        match dtype {
            WeightDtype::F32 => &self.f32,
            WeightDtype::F16 => &self.f16,
            WeightDtype::Bf16 => &self.bf16,
            WeightDtype::I8 => &self.i8,
        }
    }
}

/// The instruction set in use: `avx512f`, `avx2+fma+f16c`, `neon` or `scalar`.
pub fn isa_name() -> &'static str {
    Kernels::detect().name
}
