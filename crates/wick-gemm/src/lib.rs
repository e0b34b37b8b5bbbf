//! Stands in for the `gemm` crate, version 0.19.0: the same kernels, and products with weights that are not in memory.
//!
//! Candle multiplies matrices on the CPU through `gemm::gemm`, at one place. With
//!
//! ```toml
//! [patch.crates-io]
//! gemm = { path = "candle-wick/crates/wick-gemm" } # where candle-wick was cloned
//! ```
//!
//! in the workspace of a program that place calls this crate. A product whose right side is a registered placeholder
//! ([`wick`]) is computed by whoever registered it; all others go to the kernels of gemm 0.19.0 (`gemm-f32` and its
//! siblings), called as gemm itself calls them, so that results are the same to the bit.
//!
//! Locked to 0.19.0 by its own version and by those of the kernels. `candle-wick` with its feature `wick-gemm` needs the module
//! `wick`: without the patch it does not compile. That candle itself has another gemm is seen when a model is built.
//!
//! Not here: candle, files, models.

mod dispatch;
pub mod wick;

pub use dispatch::{c32, c64, gemm};
#[cfg(feature = "f16")]
pub use gemm_f16::f16;

pub use gemm_common::gemm::{
    get_lhs_packing_threshold_multi_thread, get_lhs_packing_threshold_single_thread,
    get_rhs_packing_threshold, get_threading_threshold, set_lhs_packing_threshold_multi_thread,
    set_lhs_packing_threshold_single_thread, set_rhs_packing_threshold, set_threading_threshold,
    DEFAULT_LHS_PACKING_THRESHOLD_MULTI_THREAD, DEFAULT_LHS_PACKING_THRESHOLD_SINGLE_THREAD,
    DEFAULT_RHS_PACKING_THRESHOLD, DEFAULT_THREADING_THRESHOLD,
};
pub use gemm_common::{get_wasm_simd128, set_wasm_simd128, Parallelism, DEFAULT_WASM_SIMD128};
