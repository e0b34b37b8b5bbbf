//! The tensors of a layer's predictor: the one table of their names, dtypes and shapes, for who writes them and who
//! reads them.
//!
//! Not here: what their values mean (docs/FORMAT.md), what the file says of itself in its header.

use crate::dtype::StoredDtype;
use crate::layer::FfnLayer;
use crate::layout::TensorSpec;

/// A tensor of a layer's predictor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PredictorPart {
    /// Of a low-rank pair, from the input: `[rank, hidden]`, in the dtype of the pair.
    Down,
    /// Of a low-rank pair, to the neurons: `[intermediate, rank]`, in the dtype of the pair.
    Up,
    /// What the products of `Down`'s rows are multiplied by, where it is I8: F32 `[rank]`.
    DownScale,
    /// The same of `Up`: F32 `[intermediate]`.
    UpScale,
    /// Of a low-rank pair: F32 `[intermediate]`.
    UpBias,
    /// Packed rows of the deciding matrix: U8 `[intermediate, bytes of a row]`.
    Gate,
    /// Scales of their groups: F16 `[intermediate, groups]`.
    GateScale,
    /// Of a quantised gate: F32 `[intermediate]`.
    GateBias,
}

impl PredictorPart {
    /// A low-rank pair of floating-point numbers, in the order of the file.
    pub const PAIR: [Self; 3] = [Self::Down, Self::Up, Self::UpBias];
    /// A low-rank pair of 8-bit numbers, in the order of the file.
    pub const PAIR_I8: [Self; 5] = [
        Self::Down,
        Self::Up,
        Self::DownScale,
        Self::UpScale,
        Self::UpBias,
    ];
    /// A quantised gate, in the order of the file.
    pub const GATE: [Self; 3] = [Self::Gate, Self::GateScale, Self::GateBias];

    /// What follows `<prefix>.predictor.` in the tensor's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Down => "down.weight",
            Self::Up => "up.weight",
            Self::DownScale => "down.scale",
            Self::UpScale => "up.scale",
            Self::UpBias => "up.bias",
            Self::Gate => "gate.weight",
            Self::GateScale => "gate.scale",
            Self::GateBias => "gate.bias",
        }
    }

    /// This tensor of `layer`'s predictor. What the layer leaves open is `dtype`, the element type of a pair's matrices, and
    /// `width`: the rank of a pair, the bytes of a gate's row, the groups of its scales. It plays no part in tensors that
    /// leave nothing open.
    pub fn spec(self, layer: &FfnLayer, dtype: StoredDtype, width: usize) -> TensorSpec {
        let ffn = layer.intermediate_size;
        let (dtype, shape) = match self {
            Self::Down => (dtype, &[width, layer.hidden_size][..]),
            Self::Up => (dtype, &[ffn, width][..]),
            Self::DownScale => (StoredDtype::F32, &[width][..]),
            Self::Gate => (StoredDtype::U8, &[ffn, width][..]),
            Self::GateScale => (StoredDtype::F16, &[ffn, width][..]),
            Self::UpScale | Self::UpBias | Self::GateBias => (StoredDtype::F32, &[ffn][..]),
        };
        TensorSpec::new(layer.predictor_tensor(self), dtype, shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Layout};

    /// Against the table of docs/FORMAT.md, written out once more.
    #[test]
    fn names_dtypes_and_shapes_are_those_of_the_format() {
        let layer = FfnLayer {
            prefix: "layers.7".to_owned(),
            file: "layers".to_owned(),
            layout: Layout::Neuron,
            hidden_size: 130,
            intermediate_size: 40,
            stride_bytes: 1024,
            column_strides: None,
            dtype: Dtype::F16,
            gate: None,
            up: "layers.7.fc1.weight".to_owned(),
            down: "layers.7.fc2.weight".to_owned(),
            gate_bias: None,
            up_bias: None,
            down_bias: None,
        };
        let lines = |parts: &[PredictorPart], dtype, width| -> Vec<String> {
            let line = |part: &PredictorPart| {
                let TensorSpec { name, dtype, shape } = part.spec(&layer, dtype, width);
                format!("{name} {dtype} {shape:?}")
            };
            parts.iter().map(line).collect()
        };
        let expected = [
            "layers.7.predictor.down.weight F16 [6, 130]",
            "layers.7.predictor.up.weight F16 [40, 6]",
            "layers.7.predictor.up.bias F32 [40]",
        ];
        assert_eq!(lines(&PredictorPart::PAIR, StoredDtype::F16, 6), expected);
        let expected = [
            "layers.7.predictor.down.weight I8 [6, 130]",
            "layers.7.predictor.up.weight I8 [40, 6]",
            "layers.7.predictor.down.scale F32 [6]",
            "layers.7.predictor.up.scale F32 [40]",
            "layers.7.predictor.up.bias F32 [40]",
        ];
        assert_eq!(lines(&PredictorPart::PAIR_I8, StoredDtype::I8, 6), expected);
        let expected = [
            "layers.7.predictor.gate.weight U8 [40, 3]",
            "layers.7.predictor.gate.scale F16 [40, 3]",
            "layers.7.predictor.gate.bias F32 [40]",
        ];
        assert_eq!(lines(&PredictorPart::GATE, StoredDtype::U8, 3), expected);
    }
}
