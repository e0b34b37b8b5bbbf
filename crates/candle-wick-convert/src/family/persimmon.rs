//! Persimmon: norms before attention and FFN, q, k and v of each head in one tensor, biases everywhere but at the
//! head, squared ReLU.
//!
//! Names of Adept's own release become those of transformers.

use super::{parameters, with_prefix, Family, LayerSpec, ModelSpec, TensorNeed, CURRENT};
use crate::config::ModelConfig;
use crate::ConvertError;

pub(super) const FAMILY: Family = Family {
    model_types: &["persimmon"],
    supported: "persimmon",
    modernise,
    rename,
    spec,
    ..CURRENT
};

const EMBEDDING: &str = "model.embed_tokens.weight";

fn modernise(config: &mut ModelConfig) -> Result<(), ConvertError> {
    config.set_default("hidden_act", "relu2");
    Ok(())
}

/// Also of a model that was saved without its head, in which they have no prefix.
fn rename(name: &str) -> String {
    let current = name
        .replace(".self_attention.", ".self_attn.")
        .replace("language_model.encoder.", "model.")
        .replace(
            "language_model.embedding.word_embeddings.",
            "model.embed_tokens.",
        )
        .replace("word_embeddings_for_head.", "lm_head.");
    with_prefix(
        &current,
        "model.",
        &["embed_tokens.", "layers.", "final_layernorm."],
    )
}

fn spec(config: &ModelConfig) -> Result<ModelSpec, ConvertError> {
    let hidden = config.size("hidden_size")?;
    let vocab = config.size("vocab_size")?;
    let layer_count = config.layer_count("num_hidden_layers")?;
    let shapes = LayerShapes::of(config, hidden)?;
    let mut resident = vec![TensorNeed::new(EMBEDDING, &[vocab, hidden])];
    let mut layers = Vec::with_capacity(layer_count);
    for n in 0..layer_count {
        let layer = format!("model.layers.{n}");
        shapes.push_resident(&layer, &mut resident);
        let ffn = shapes.ffn(&layer);
        resident.extend(ffn.biases(hidden));
        layers.push(ffn);
    }
    resident.extend(parameters("model.final_layernorm", &[hidden], true));
    Ok(ModelSpec {
        hidden_size: hidden,
        layers,
        resident,
        embedding: EMBEDDING.to_string(),
        head: TensorNeed::new("lm_head.weight", &[vocab, hidden]),
        tied: config.flag_or("tie_word_embeddings", false)?,
        computed: &[".rotary_emb.inv_freq"],
    })
}

/// What all layers share.
struct LayerShapes {
    hidden: usize,
    intermediate: usize,
    head_dim: usize,
    qk_layernorm: bool,
}

impl LayerShapes {
    fn of(config: &ModelConfig, hidden: usize) -> Result<Self, ConvertError> {
        Ok(Self {
            hidden,
            intermediate: config.size("intermediate_size")?,
            head_dim: hidden / config.divisor("num_attention_heads", hidden)?,
            qk_layernorm: config.flag_or("qk_layernorm", true)?,
        })
    }

    fn push_resident(&self, layer: &str, resident: &mut Vec<TensorNeed>) {
        let mut push = |name: &str, shape: &[usize]| {
            resident.extend(parameters(&format!("{layer}.{name}"), shape, true));
        };
        push("input_layernorm", &[self.hidden]);
        let fused = [3 * self.hidden, self.hidden]; // sizes are below 2^24
        push("self_attn.query_key_value", &fused);
        push("self_attn.dense", &[self.hidden, self.hidden]);
        if self.qk_layernorm {
            push("self_attn.q_layernorm", &[self.head_dim]);
            push("self_attn.k_layernorm", &[self.head_dim]);
        }
        push("post_attention_layernorm", &[self.hidden]);
    }

    fn ffn(&self, layer: &str) -> LayerSpec {
        let modules = ["dense_h_to_4h", "dense_4h_to_h"];
        let prefix = format!("{layer}.mlp");
        LayerSpec::plain(&prefix, modules, self.intermediate, true)
    }
}

#[cfg(test)]
mod tests {
    use super::rename;

    #[test]
    fn names_of_the_first_release_become_current_ones() {
        for (old, current) in [
            (
                "language_model.encoder.layers.7.self_attention.query_key_value.bias",
                "model.layers.7.self_attn.query_key_value.bias",
            ),
            (
                "language_model.encoder.final_layernorm.weight",
                "model.final_layernorm.weight",
            ),
            (
                "language_model.embedding.word_embeddings.weight",
                "model.embed_tokens.weight",
            ),
            ("word_embeddings_for_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(rename(old), current);
            assert_eq!(rename(current), current);
        }
    }
}
