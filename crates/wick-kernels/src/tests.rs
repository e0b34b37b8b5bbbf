//! Kernels against their slow, obvious versions, on every instruction set this machine has.
//!
//! `naive` holds the versions and the test matrices, `close` compares with sums in `f64`, `bits`
//! holds the promises about bits, `packed` has rows of few bits.

mod bits;
mod close;
mod naive;
mod packed;

use crate::kernels::Kernels;
use crate::WeightDtype;

const DTYPES: [WeightDtype; 4] = [
    WeightDtype::F32,
    WeightDtype::F16,
    WeightDtype::Bf16,
    WeightDtype::I8,
];

/// The tables this machine can run.
fn tables() -> Vec<&'static Kernels> {
    Kernels::available().collect()
}

/// Lanes of the vectors of a table.
fn lanes(kernels: &Kernels) -> usize {
    match kernels.name {
        "avx512f" => 16,
        _ => 8,
    }
}

#[test]
fn the_fastest_set_is_chosen_unless_another_is_asked_for() {
    let fastest = tables()[tables().len() - 1].name;
    for nothing in ["", "nonsense", "avx2 "] {
        assert_eq!(Kernels::choose(nothing).name, fastest);
    }
    for kernels in tables() {
        assert_eq!(Kernels::choose(kernels.name).name, kernels.name);
        assert_eq!(
            Kernels::choose(&kernels.name[..kernels.name.len() - 1]).name,
            kernels.name
        );
    }
}

#[test]
fn names_and_sizes() {
    let names: Vec<&str> = tables().iter().map(|kernels| kernels.name).collect();
    assert_eq!(names[0], "scalar");
    assert!(names.contains(&crate::isa_name()));
    let sizes = DTYPES.map(|dtype| (dtype.name(), dtype.size_bytes()));
    assert_eq!(sizes, [("f32", 4), ("f16", 2), ("bf16", 2), ("i8", 1)]);
}
