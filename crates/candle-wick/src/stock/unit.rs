//! What is streamed: matrices, and the units that they are read in.

use candle::Tensor;

use super::source::Extents;

/// A matrix that a model holds a placeholder of.
pub(super) struct StreamedMatrix {
    pub(super) name: String,
    /// Shares its storage with the model's.
    pub(super) tensor: Tensor,
    pub(super) unit: usize,
    /// Position among the matrices of its unit.
    pub(super) member: usize,
}

/// Matrices that are read together.
pub(super) struct Unit {
    pub(super) extents: Vec<Extents>,
    /// Dtype and number of values of each matrix.
    pub(super) sizes: Vec<(candle::DType, usize)>,
    pub(super) is_expert: bool,
}

impl Unit {
    pub(super) fn bytes(&self) -> u64 {
        let bytes = |(dtype, len): &(candle::DType, usize)| (dtype.size_in_bytes() * len) as u64;
        self.sizes.iter().map(bytes).sum()
    }
}

/// Bytes of the largest block that is read of any of `units` at once.
pub(super) fn largest_block_bytes(units: &[Unit]) -> usize {
    let extents = units.iter().flat_map(|unit| &unit.extents);
    extents.map(Extents::block_bytes).max().unwrap_or(0)
}
