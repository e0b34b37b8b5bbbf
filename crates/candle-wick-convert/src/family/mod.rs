//! The model families: which tensors a model of a given `config.json` has.
//!
//! One file a family, found by `model_type`. To add one: write `spec`, what else differs from
//! [`CURRENT`] for old uploads, and list it in [`FAMILIES`].

mod falcon;
mod llama;
mod opt;
mod persimmon;
mod phi;

use crate::config::ModelConfig;
use crate::source::SourceFolder;
use crate::ConvertError;

/// One family.
pub(crate) struct Family {
    /// Values of `model_type` in `config.json`.
    model_types: &'static [&'static str],
    /// What is supported of it, for messages.
    supported: &'static str,
    /// Key of the activation in `config.json`.
    pub(crate) activation_key: &'static str,
    /// Brings the config of an older upload to the current keys.
    pub(crate) modernise: fn(&mut ModelConfig) -> Result<(), ConvertError>,
    /// Current name of a tensor that older uploads call otherwise.
    pub(crate) rename: fn(&str) -> String,
    /// Gives the parts of tensors that older uploads put together their current names.
    pub(crate) split: fn(&ModelConfig, &mut SourceFolder) -> Result<(), ConvertError>,
    /// The tensors.
    pub(crate) spec: fn(&ModelConfig) -> Result<ModelSpec, ConvertError>,
}

/// A family whose uploads always looked as they do now, to be filled in.
const CURRENT: Family = Family {
    model_types: &[],
    supported: "",
    activation_key: "hidden_act",
    modernise: |_| Ok(()),
    rename: str::to_string,
    split: |_, _| Ok(()),
    spec: |_| Err(unsupported("this family")),
};

const FAMILIES: &[Family] = &[
    falcon::FAMILY,
    llama::FAMILY,
    opt::FAMILY,
    persimmon::FAMILY,
    phi::FAMILY,
];

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

/// The name that a tensor has in a whole model, for one that was saved without its head: `prefix` is left out there
/// before each of `parts`.
fn with_prefix(name: &str, prefix: &str, parts: &[&str]) -> String {
    if parts.iter().any(|part| name.starts_with(part)) {
        format!("{prefix}{name}")
    } else {
        name.to_string()
    }
}

/// Parameters of the linear layer or norm `name`: the weight, of `shape`, and the bias where it has one.
fn parameters(name: &str, shape: &[usize], bias: bool) -> impl Iterator<Item = TensorNeed> {
    let weight = TensorNeed::new(format!("{name}.weight"), shape);
    let bias = bias.then(|| TensorNeed::new(format!("{name}.bias"), &shape[..1]));
    [weight].into_iter().chain(bias)
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
    /// The FFN at `prefix` whose linear layers are called `up` and `down`, both with a bias or both without.
    fn plain(prefix: &str, [up, down]: [&str; 2], intermediate_size: usize, bias: bool) -> Self {
        let bias = |name: &str| bias.then(|| format!("{prefix}.{name}.bias"));
        Self {
            prefix: prefix.to_string(),
            intermediate_size,
            gate: None,
            up: format!("{prefix}.{up}.weight"),
            down: format!("{prefix}.{down}.weight"),
            gate_bias: None,
            up_bias: bias(up),
            down_bias: bias(down),
        }
    }

    /// The biases with their shapes.
    fn biases(&self, hidden_size: usize) -> Vec<TensorNeed> {
        let biases = [
            (&self.gate_bias, self.intermediate_size),
            (&self.up_bias, self.intermediate_size),
            (&self.down_bias, hidden_size),
        ];
        let need = |(name, size): (&Option<String>, usize)| {
            name.as_ref().map(|name| TensorNeed::new(name, &[size]))
        };
        biases.into_iter().filter_map(need).collect()
    }

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

/// The family of a config.
pub(crate) fn family_of(config: &ModelConfig) -> Result<&'static Family, ConvertError> {
    let model_type = config.text("model_type")?;
    let family = FAMILIES
        .iter()
        .find(|family| family.model_types.contains(&model_type))
        .ok_or_else(|| unsupported(format!("model_type `{model_type}`")))?;
    if config.has("quantization_config") {
        return Err(ConvertError::Unsupported {
            got: "a quantised checkpoint (`quantization_config` in config.json)".into(),
            supported: "weights in f32, f16, bf16".into(),
        });
    }
    Ok(family)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_types_are_unique() {
        let types: Vec<_> = FAMILIES
            .iter()
            .flat_map(|family| family.model_types)
            .collect();
        let unique: std::collections::BTreeSet<_> = types.iter().collect();
        assert_eq!(types.len(), unique.len());
    }

    #[test]
    fn names_of_models_without_their_head() {
        for (family, current) in [
            (&falcon::FAMILY, "transformer.h.3.ln_attn.weight"),
            (&falcon::FAMILY, "transformer.word_embeddings.weight"),
            (&llama::FAMILY, "model.layers.3.mlp.up_proj.weight"),
            (&llama::FAMILY, "model.norm.weight"),
            (&opt::FAMILY, "model.decoder.layers.3.fc1.bias"),
            (&persimmon::FAMILY, "model.layers.3.mlp.dense_h_to_4h.bias"),
            (&persimmon::FAMILY, "model.final_layernorm.bias"),
        ] {
            let (_, bare) = current.split_once('.').unwrap();
            assert_eq!((family.rename)(bare), current);
            assert_eq!((family.rename)(current), current);
            assert_eq!((family.rename)("lm_head.weight"), "lm_head.weight");
        }
    }
}
