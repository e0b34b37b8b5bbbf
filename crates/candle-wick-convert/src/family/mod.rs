//! The model families: which tensors a model of a given `config.json` has.
//!
//! One file a family, found by `model_type`. To add one: write `spec` (and `rename` when old
//! uploads have other names), and list it in [`FAMILIES`].

mod llama;
mod opt;

use crate::config::ModelConfig;
use crate::ConvertError;

/// Activations that the layers can compute, by their names in `config.json`.
const ACTIVATIONS: [&str; 7] = [
    "relu",
    "relu2",
    "silu",
    "swish",
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
];

/// One family.
pub(crate) struct Family {
    /// `model_type` in `config.json`.
    model_type: &'static str,
    /// What is supported of it, for messages.
    supported: &'static str,
    /// Key of the activation in `config.json`.
    pub(crate) activation_key: &'static str,
    /// Current name of a tensor that older uploads call otherwise.
    pub(crate) rename: fn(&str) -> String,
    /// The tensors.
    spec: fn(&ModelConfig) -> Result<ModelSpec, ConvertError>,
}

const FAMILIES: &[Family] = &[llama::FAMILY, opt::FAMILY];

/// The tensors of one model.
pub(crate) struct ModelSpec {
    /// Elements of a record's row.
    pub(crate) hidden_size: usize,
    /// The FFN of each layer.
    pub(crate) layers: Vec<LayerSpec>,
    /// Everything else, without the head.
    pub(crate) resident: Vec<TensorNeed>,
    /// Name of the token embedding, which is in `resident`.
    pub(crate) embedding: String,
    /// The output head.
    pub(crate) head: TensorNeed,
    /// Whether the head is the embedding, by the config.
    pub(crate) tied: bool,
    /// Endings of names that are known and not needed, and why.
    pub(crate) computed: &'static [&'static str],
}

/// A tensor by name and shape.
#[derive(Clone, Debug)]
pub(crate) struct TensorNeed {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
}

impl TensorNeed {
    pub(crate) fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
        }
    }
}

/// The FFN of one layer: names of the matrices and of their biases (which are in `resident`).
pub(crate) struct LayerSpec {
    pub(crate) prefix: String,
    pub(crate) intermediate_size: usize,
    pub(crate) gate: Option<String>,
    pub(crate) up: String,
    pub(crate) down: String,
    pub(crate) gate_bias: Option<String>,
    pub(crate) up_bias: Option<String>,
    pub(crate) down_bias: Option<String>,
}

impl LayerSpec {
    /// The matrices with their shapes, in the record's order.
    pub(crate) fn matrices(&self, hidden_size: usize) -> Vec<TensorNeed> {
        let up = [self.intermediate_size, hidden_size];
        let down = [hidden_size, self.intermediate_size];
        let gate = self.gate.iter().map(|name| TensorNeed::new(name, &up));
        gate.chain([
            TensorNeed::new(&self.up, &up),
            TensorNeed::new(&self.down, &down),
        ])
        .collect()
    }
}

/// The supported families in a sentence's words.
pub fn supported_families() -> String {
    FAMILIES
        .iter()
        .map(|family| family.supported)
        .collect::<Vec<_>>()
        .join(", ")
}

pub(crate) fn unsupported(got: impl Into<String>) -> ConvertError {
    ConvertError::Unsupported {
        got: got.into(),
        supported: supported_families(),
    }
}

/// The family of a config, and the tensors by it.
pub(crate) fn spec_of(config: &ModelConfig) -> Result<(&'static Family, ModelSpec), ConvertError> {
    let model_type = config.text("model_type")?;
    let family = FAMILIES
        .iter()
        .find(|family| family.model_type == model_type)
        .ok_or_else(|| unsupported(format!("model_type `{model_type}`")))?;
    if config.has("quantization_config") {
        return Err(ConvertError::Unsupported {
            got: "a quantised checkpoint (`quantization_config` in config.json)".into(),
            supported: "weights in f32, f16, bf16".into(),
        });
    }
    Ok((family, (family.spec)(config)?))
}

/// The activation by the config or by the user, refused when no layer can compute it.
pub(crate) fn check_activation(
    family: &Family,
    config: &ModelConfig,
    wanted: Option<&str>,
) -> Result<(), ConvertError> {
    let activation = match wanted {
        Some(wanted) => wanted,
        None => config.text(family.activation_key)?,
    };
    if ACTIVATIONS.contains(&activation) {
        return Ok(());
    }
    Err(ConvertError::Unsupported {
        got: format!("activation `{activation}`"),
        supported: ACTIVATIONS.join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_types_are_unique() {
        for (position, family) in FAMILIES.iter().enumerate() {
            let first = FAMILIES
                .iter()
                .position(|other| other.model_type == family.model_type);
            assert_eq!(first, Some(position));
        }
    }

    #[test]
    fn old_opt_names_become_current_ones() {
        let rename = opt::FAMILY.rename;
        assert_eq!(
            rename("decoder.layers.0.fc1.weight"),
            "model.decoder.layers.0.fc1.weight"
        );
        assert_eq!(
            rename("model.decoder.layers.0.fc1.bias"),
            "model.decoder.layers.0.fc1.bias"
        );
        assert_eq!(rename("lm_head.weight"), "lm_head.weight");
    }
}
