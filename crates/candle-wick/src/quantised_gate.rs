//! The matrix that decides which neurons are active, once more, in 1, 2 or 4 bits a weight: a predictor that nobody has to
//! train.
//!
//! Its rows lie as `wick_kernels` packs them: `gate.weight` U8 `(intermediate, bytes of a row)`, and `gate.scale` F16
//! `(intermediate, groups)`. How many bits a weight has follows from the bytes of a row.
//!
//! Not here: bias and threshold (`predictor`), making such a copy (`candle-wick-convert`).

use std::ops::Range;

use half::f16;
use wick_format::{FfnLayer, PredictorPart, StoredDtype};
use wick_kernels::{packed_groups, PackedBits, PackedRows};

use crate::error::Result;
use crate::folder::FlashFolder;
use crate::matrix::resident_bytes;
use crate::predictor::{expect_tensor, predictor_error, tensor_extent};

/// The quantised rows of one layer, in DRAM.
pub(crate) struct QuantisedGate {
    folder: FlashFolder,
    bits: PackedBits,
    row_bytes: usize,
    groups: usize,
    weights: Vec<u8>,
    scales: Vec<u8>,
}

impl QuantisedGate {
    pub(crate) fn load(folder: &FlashFolder, layer: &FfnLayer) -> Result<Self> {
        let (weight, scale) = (
            layer.predictor_tensor(PredictorPart::Gate),
            layer.predictor_tensor(PredictorPart::GateScale),
        );
        let groups = packed_groups(layer.hidden_size);
        let bits = packed_bits(folder, layer)?;
        let shape = [layer.intermediate_size, groups];
        expect_tensor(folder, &scale, &[StoredDtype::F16], &shape)?;
        let scales = resident_bytes(folder, &folder.stored_matrix(&scale)?)?;
        let mut each = scales
            .chunks_exact(2)
            .map(|bytes| f16::from_le_bytes([bytes[0], bytes[1]]));
        if let Some(at) = each.position(|scale| !scale.is_finite()) {
            let (neuron, group) = (at / groups, at % groups);
            let reason = format!("tensor {scale}: scale {group} of neuron {neuron} is not finite");
            return Err(predictor_error(folder, reason));
        }
        Ok(Self {
            folder: folder.clone(),
            bits,
            row_bytes: bits.row_bytes(layer.hidden_size),
            groups,
            weights: resident_bytes(folder, &folder.stored_matrix(&weight)?)?,
            scales,
        })
    }

    /// The products `(neurons, tokens)` of some rows with `x` `(tokens, hidden)`.
    pub(crate) fn scores(&self, neurons: Range<usize>, x: &[f32], tokens: usize, out: &mut [f32]) {
        let of_rows = |bytes| neurons.start * bytes..neurons.end * bytes;
        let rows = PackedRows {
            bits: self.bits,
            weights: &self.weights[of_rows(self.row_bytes)],
            scales: &self.scales[of_rows(2 * self.groups)],
        };
        rows.dot(x, tokens, out);
    }

    /// Books one product with the whole matrix.
    pub(crate) fn count_multiplied(&self) {
        let bytes = self.weights.len() + self.scales.len();
        self.folder.count_multiplied(bytes);
    }
}

/// Bits of a weight of a layer's quantised gate, by the bytes of its rows.
pub(crate) fn packed_bits(folder: &FlashFolder, layer: &FfnLayer) -> Result<PackedBits> {
    let name = &layer.predictor_tensor(PredictorPart::Gate);
    let got = tensor_extent(folder, name)?;
    let (ffn, hidden) = (layer.intermediate_size, layer.hidden_size);
    let fits = |bits: &PackedBits| got.shape == [ffn, bits.row_bytes(hidden)];
    match PackedBits::ALL.into_iter().find(fits) {
        Some(bits) if got.dtype == StoredDtype::U8 => Ok(bits),
        _ => {
            let (dtype, shape) = (got.dtype, &got.shape);
            let [one, two, four] = PackedBits::ALL.map(|bits| bits.row_bytes(hidden));
            let reason = format!(
                "tensor {name} is {dtype} {shape:?}, expected U8 [{ffn}, {one}], [{ffn}, {two}] or [{ffn}, {four}]: \
                 rows of 1, 2 or 4 bits for {hidden} inputs"
            );
            Err(predictor_error(folder, reason))
        }
    }
}
