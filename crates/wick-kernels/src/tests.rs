//! Kernels against their slow, obvious versions, on every instruction set this machine has.
//!
//! `naive` holds the versions and the test matrices, `close` compares with sums in `f64`, `bits`
//! holds the promises about bits.

mod bits;
mod close;
mod naive;

use crate::kernels::Kernels;
use crate::WeightDtype;

const DTYPES: [WeightDtype; 3] = [WeightDtype::F32, WeightDtype::F16, WeightDtype::Bf16];

/// The tables this machine can run.
fn tables() -> Vec<&'static Kernels> {
    let mut tables = vec![&crate::scalar::KERNELS];
    #[cfg(target_arch = "x86_64")]
    if crate::avx2::is_available() {
        tables.push(&crate::avx2::KERNELS);
    }
    tables
}

#[test]
fn names_and_sizes() {
    assert!(["scalar", "avx2+fma+f16c"].contains(&crate::isa_name()));
    let sizes = DTYPES.map(|dtype| (dtype.name(), dtype.size_bytes()));
    assert_eq!(sizes, [("f32", 4), ("f16", 2), ("bf16", 2)]);
}
