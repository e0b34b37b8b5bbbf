//! The three operations on whole slices: dot, axpy, widen. Single-threaded.

use crate::dtype::WeightDtype;
use crate::kernels::Kernels;

/// The dot product of two slices of one length, in the order the crate's page fixes.
///
/// # Panics
/// When the lengths differ.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "dot of slices of different lengths");
    // SAFETY: `detect` chose a table this CPU can run.
    unsafe { (Kernels::detect().dot)(a, b) }
}

/// `y[i] += alpha * x[i]`, each a fused multiply-add.
///
/// # Panics
/// When the lengths differ.
pub fn axpy(alpha: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "axpy of slices of different lengths");
    // SAFETY: `detect` chose a table this CPU can run.
    unsafe { (Kernels::detect().axpy)(alpha, x, y) }
}

/// Stored weights to `f32`, exactly (a signalling NaN may become quiet).
///
/// # Panics
/// When `bytes` is not exactly `out.len()` weights.
pub fn widen(dtype: WeightDtype, bytes: &[u8], out: &mut [f32]) {
    let expected = out.len() * dtype.size_bytes();
    assert_eq!(bytes.len(), expected, "widen of another length than out");
    // SAFETY: `detect` chose a table this CPU can run.
    unsafe { (Kernels::detect().of(dtype).widen)(bytes, out) }
}
