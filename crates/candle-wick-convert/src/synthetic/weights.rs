//! Which random values the tensors of a model get.
//!
//! - A weight matrix: uniform, mean 0, standard deviation `1/sqrt(columns)`: inputs of variance 1, as every norm
//!   gives them, become outputs of variance 1, and hidden states stay far inside f16 through all layers.
//! - A norm: weight 1, bias 0, exactly.
//! - The bias of the matrix that decides which neurons are active: -0.43 everywhere. Its pre-activations have about
//!   the distribution N(0, 1), which exceeds 0.43 for a third.
//! - Any other bias: uniform with a standard deviation of 0.02.
//!
//! Where the FFN has no bias, half of the neurons are active. Trained ReLU models have 3 to 10 %: what these weights
//! say about sparsity is worth nothing, their sizes are everything.

use std::collections::BTreeMap;

use crate::family::{LayerSpec, ModelSpec, TensorNeed};
use crate::source::{Random, SourceFolder};

/// A standard normal variable exceeds its negative for a third.
const DECIDING_BIAS: f32 = -0.43;

/// Standard deviation of a bias that decides nothing.
const BIAS_DEVIATION: f32 = 0.02;

/// All tensors of the model, as a source called `name`.
pub(super) fn source(name: &str, spec: &ModelSpec, seed: u64) -> SourceFolder {
    let mut needs = spec.resident.clone();
    for layer in &spec.layers {
        needs.extend(layer.matrices(spec.hidden_size));
    }
    if !spec.tied {
        needs.push(spec.head.clone());
    }
    let dims_of: BTreeMap<&str, usize> = needs
        .iter()
        .map(|need| (need.name.as_str(), need.shape.len()))
        .collect();
    let deciding: Vec<&str> = spec.layers.iter().filter_map(deciding_bias).collect();
    let values = |need: &TensorNeed| -> Random {
        let name = need.name.as_str();
        if let [_, columns] = *need.shape {
            return Random::uniform(seed, name, deviation(columns));
        }
        match name.strip_suffix(".bias") {
            None => Random::constant(1.0), // only norms have weights of one dimension
            Some(_) if deciding.contains(&name) => Random::constant(DECIDING_BIAS),
            Some(module) if dims_of.get(format!("{module}.weight").as_str()) == Some(&1) => {
                Random::constant(0.0)
            }
            Some(_) => Random::uniform(seed, name, BIAS_DEVIATION),
        }
    };
    let tensors: Vec<_> = needs
        .iter()
        .map(|need| (need.clone(), values(need)))
        .collect();
    SourceFolder::random(name, tensors)
}

/// Whether a bias brings the share of active neurons down, in every layer.
pub(super) fn has_deciding_bias(spec: &ModelSpec) -> bool {
    spec.layers
        .iter()
        .all(|layer| deciding_bias(layer).is_some())
}

/// The bias of the matrix that decides: a gated FFN's is the gate.
fn deciding_bias(layer: &LayerSpec) -> Option<&str> {
    let bias = match &layer.gate {
        Some(_) => &layer.gate_bias,
        None => &layer.up_bias,
    };
    bias.as_deref()
}

/// Standard deviation of a matrix with this many columns.
pub(super) fn deviation(columns: usize) -> f32 {
    1.0 / (columns.max(1) as f32).sqrt()
}

#[cfg(test)]
mod tests {
    use wick_format::Dtype;

    use super::super::{checkpoint, Geometry};
    use crate::check::Checkpoint;
    use crate::ConvertOptions;

    /// The first eight rows of a tensor, up to 512 columns of each.
    fn first_values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
        let tensor = checkpoint.source.get(name).unwrap();
        let columns = tensor.width().min(512);
        let rows = tensor.rows().min(8);
        let mut bytes = vec![0; rows * columns * 4];
        let source = &checkpoint.source;
        source
            .read(tensor, 0..rows, 0..columns, Dtype::F32, &mut bytes)
            .unwrap();
        let (values, _) = bytes.as_chunks::<4>();
        values
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    }

    /// Of every model, a layer.
    #[test]
    fn norms_are_neutral_and_matrices_keep_the_variance() {
        let mut deciding = Vec::new();
        for geometry in Geometry::all() {
            let options = ConvertOptions::default();
            let checkpoint = checkpoint(geometry, 1, 3, &options).unwrap();
            for (need, _) in &checkpoint.resident {
                let values = first_values(&checkpoint, &need.name);
                let count = values.len() as f32;
                let power = values.iter().map(|value| value * value).sum::<f32>() / count;
                let case = format!("{geometry} {}", need.name);
                let is_norm = need.name.contains("norm") || need.name.contains("ln_f");
                match (&need.shape[..], need.name.ends_with("bias")) {
                    ([_, columns], _) => {
                        let variance = power * *columns as f32;
                        assert!((0.8..1.2).contains(&variance), "{case}: {variance}");
                    }
                    (_, false) => assert!(is_norm && values.iter().all(|v| *v == 1.0), "{case}"),
                    (_, true) if is_norm => assert_eq!(power, 0.0, "{case}"),
                    (_, true) if values[0] == super::DECIDING_BIAS => {
                        assert!(values.iter().all(|v| *v == values[0]), "{case}");
                        deciding.push(need.name.clone());
                    }
                    _ => assert!(power > 0.0 && power.sqrt() < 0.03, "{case}: {power}"),
                }
            }
        }
        let opt = "model.decoder.layers.0.fc1.bias".to_owned();
        let persimmon = "model.layers.0.mlp.dense_h_to_4h.bias".to_owned();
        let phi = "model.layers.0.mlp.fc1.bias".to_owned();
        assert_eq!(deciding, [opt.clone(), opt.clone(), opt, persimmon, phi]);
    }
}
