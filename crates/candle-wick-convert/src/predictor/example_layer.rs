//! A layer that tests of what is made for one take, with no file behind it.

use wick_format::{Dtype, FfnLayer, Layout};

/// Layer 0 of a model whose FFNs have no gate, in f16.
pub(super) fn example_layer(hidden_size: usize, intermediate_size: usize) -> FfnLayer {
    FfnLayer {
        prefix: "layers.0".to_owned(),
        file: "layers".to_owned(),
        layout: Layout::Neuron,
        hidden_size,
        intermediate_size,
        stride_bytes: 512,
        column_strides: None,
        dtype: Dtype::F16,
        gate: None,
        up: "layers.0.fc1.weight".to_owned(),
        down: "layers.0.fc2.weight".to_owned(),
        gate_bias: None,
        up_bias: None,
        down_bias: None,
    }
}
