//! Persimmon: norms before attention and FFN, q, k and v of each head in one tensor, biases everywhere but at the
//! head, squared ReLU.
//!
//! Names of Adept's own release become those of transformers.

use super::{with_bias, with_prefix, Family, LayerSpec, ModelSpec, TensorNeed, CURRENT};
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
    if !config.has("hidden_act") {
        config.set("hidden_act", "relu2");
    }
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
    let intermediate = config.size("intermediate_size")?;
    let vocab = config.size("vocab_size")?;
    let layer_count = config.layer_count("num_hidden_layers")?;
    let heads = config.size("num_attention_heads")?;
    if !hidden.is_multiple_of(heads) {
        return Err(config.wrong("num_attention_heads", format!("a divisor of {hidden}")));
    }
    let qk_layernorm = config.flag_or("qk_layernorm", true)?;

    let mut resident = vec![TensorNeed::new(EMBEDDING, &[vocab, hidden])];
    let mut layers = Vec::with_capacity(layer_count);
    for n in 0..layer_count {
        let layer = format!("model.layers.{n}");
        let mut push = |name: &str, shape: &[usize]| {
            resident.extend(with_bias(&format!("{layer}.{name}"), shape));
        };
        push("input_layernorm", &[hidden]);
        push("self_attn.query_key_value", &[3 * hidden, hidden]); // sizes are below 2^24
        push("self_attn.dense", &[hidden, hidden]);
        if qk_layernorm {
            push("self_attn.q_layernorm", &[hidden / heads]);
            push("self_attn.k_layernorm", &[hidden / heads]);
        }
        push("post_attention_layernorm", &[hidden]);
        for (name, len) in [("dense_h_to_4h", intermediate), ("dense_4h_to_h", hidden)] {
            let name = format!("{layer}.mlp.{name}.bias");
            resident.push(TensorNeed::new(name, &[len]));
        }
        layers.push(ffn(&layer, intermediate));
    }
    resident.extend(with_bias("model.final_layernorm", &[hidden]));
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

fn ffn(layer: &str, intermediate_size: usize) -> LayerSpec {
    let name = |part: &str| format!("{layer}.mlp.{part}");
    LayerSpec {
        prefix: format!("{layer}.mlp"),
        intermediate_size,
        gate: None,
        up: name("dense_h_to_4h.weight"),
        down: name("dense_4h_to_h.weight"),
        gate_bias: None,
        up_bias: Some(name("dense_h_to_4h.bias")),
        down_bias: Some(name("dense_4h_to_h.bias")),
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
