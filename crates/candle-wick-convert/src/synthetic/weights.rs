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

use crate::family::{ModelSpec, TensorNeed};
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
    let deciding = spec.layers.iter().filter_map(|layer| {
        // A gated FFN is decided by its gate.
        let bias = match &layer.gate {
            Some(_) => &layer.gate_bias,
            None => &layer.up_bias,
        };
        bias.as_deref()
    });
    let deciding: Vec<&str> = deciding.collect();
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

/// Whether the share of active neurons is brought down by a bias.
pub(super) fn has_deciding_bias(spec: &ModelSpec) -> bool {
    spec.layers
        .iter()
        .all(|layer| layer.gate.is_none() && layer.up_bias.is_some())
}

/// Standard deviation of a matrix with this many columns.
pub(super) fn deviation(columns: usize) -> f32 {
    1.0 / (columns.max(1) as f32).sqrt()
}
