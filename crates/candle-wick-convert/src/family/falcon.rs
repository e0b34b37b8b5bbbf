//! Falcon: multi-query (7B), the new decoder architecture (40B, 180B, 11B) and the RW models.
//!
//! The first uploads are of type `RefinedWebModel` (7B, RW) or `RefinedWeb` (40B), with keys of their own for
//! layers and heads; their tensors have the current names. Queries, keys and values stay fused, as stored.

use super::{parameters, with_prefix, Family, LayerSpec, ModelSpec, TensorNeed, CURRENT};
use crate::config::ModelConfig;
use crate::ConvertError;

pub(super) const FAMILY: Family = Family {
    model_types: &["falcon", "RefinedWebModel", "RefinedWeb"],
    supported: "falcon",
    activation_key: "activation",
    modernise,
    rename,
    spec,
    ..CURRENT
};

const EMBEDDING: &str = "transformer.word_embeddings.weight";

fn modernise(config: &mut ModelConfig) -> Result<(), ConvertError> {
    for (old, key) in [
        ("n_embed", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_head_kv", "num_kv_heads"),
    ] {
        config.rename(old, key);
    }
    config.set_default("activation", "gelu");
    let model_type = config.text("model_type")?.to_string();
    if model_type == "falcon" {
        return Ok(());
    }
    if !config.has("new_decoder_architecture") {
        let new = is_new_architecture(config, model_type == "RefinedWeb")?;
        config.set("new_decoder_architecture", new);
    }
    config.set("model_type", "falcon");
    Ok(())
}

/// Whether an upload from before that key has the new decoder architecture, whose blocks are never sequential:
/// the type of the 40B has it, the other one where it has key heads that `multi_query` does not give.
fn is_new_architecture(config: &ModelConfig, is_40b: bool) -> Result<bool, ConvertError> {
    if !config.flag_or("parallel_attn", true)? {
        return Ok(false);
    }
    let kv_heads = old_kv_heads(config)?;
    Ok(is_40b || config.size_or("num_kv_heads", kv_heads)? != kv_heads)
}

/// Key heads outside the new decoder architecture.
fn old_kv_heads(config: &ModelConfig) -> Result<usize, ConvertError> {
    let heads = config.size("num_attention_heads")?;
    let multi_query = config.flag_or("multi_query", true)?;
    Ok(if multi_query { 1 } else { heads })
}

/// A model that was saved without its head has names without the prefix.
fn rename(name: &str) -> String {
    with_prefix(name, "transformer.", &["h.", "word_embeddings.", "ln_f."])
}

fn spec(config: &ModelConfig) -> Result<ModelSpec, ConvertError> {
    let hidden = config.size("hidden_size")?;
    let vocab = config.size("vocab_size")?;
    let layer_count = config.layer_count("num_hidden_layers")?;
    let shapes = LayerShapes::of(config, hidden)?;
    let mut resident = vec![TensorNeed::new(EMBEDDING, &[vocab, hidden])];
    let mut layers = Vec::with_capacity(layer_count);
    for n in 0..layer_count {
        let layer = format!("transformer.h.{n}");
        shapes.push_resident(&layer, &mut resident);
        let ffn = shapes.ffn(&layer);
        resident.extend(ffn.biases(hidden));
        layers.push(ffn);
    }
    resident.extend(parameters("transformer.ln_f", &[hidden], true));
    Ok(ModelSpec {
        hidden_size: hidden,
        layers,
        resident,
        embedding: EMBEDDING.to_string(),
        head: TensorNeed::new("lm_head.weight", &[vocab, hidden]),
        tied: config.flag_or("tie_word_embeddings", true)?,
        computed: &[".inv_freq"],
    })
}

/// What all layers share.
struct LayerShapes {
    hidden: usize,
    intermediate: usize,
    qkv: usize,
    bias: bool,
    norms: &'static [&'static str],
}

impl LayerShapes {
    fn of(config: &ModelConfig, hidden: usize) -> Result<Self, ConvertError> {
        let heads = config.divisor("num_attention_heads", hidden)?;
        let new = config.flag_or("new_decoder_architecture", false)?;
        let kv_heads = if new {
            config.size_or("num_kv_heads", heads)?
        } else {
            old_kv_heads(config)?
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.wrong("num_kv_heads", format!("a divisor of {heads}")));
        }
        Ok(Self {
            hidden,
            intermediate: config.size_or("ffn_hidden_size", 4 * hidden)?,
            qkv: (heads + 2 * kv_heads) * (hidden / heads),
            bias: config.flag_or("bias", false)?,
            norms: norms(config, new)?,
        })
    }

    fn push_resident(&self, layer: &str, resident: &mut Vec<TensorNeed>) {
        let mut push = |name: &str, shape: &[usize], bias: bool| {
            resident.extend(parameters(&format!("{layer}.{name}"), shape, bias));
        };
        for norm in self.norms {
            push(norm, &[self.hidden], true);
        }
        let fused = [self.qkv, self.hidden];
        push("self_attention.query_key_value", &fused, self.bias);
        let dense = [self.hidden, self.hidden];
        push("self_attention.dense", &dense, self.bias);
    }

    fn ffn(&self, layer: &str) -> LayerSpec {
        let modules = ["dense_h_to_4h", "dense_4h_to_h"];
        let prefix = format!("{layer}.mlp");
        LayerSpec::plain(&prefix, modules, self.intermediate, self.bias)
    }
}

/// Names of a layer's norms.
fn norms(config: &ModelConfig, new: bool) -> Result<&'static [&'static str], ConvertError> {
    const COUNT: &str = "num_ln_in_parallel_attn";
    if !new && !config.flag_or("parallel_attn", true)? {
        return Ok(&["input_layernorm", "post_attention_layernorm"]);
    }
    match (config.size_or(COUNT, if new { 2 } else { 1 })?, new) {
        (1, _) => Ok(&["input_layernorm"]),
        (2, true) => Ok(&["ln_attn", "ln_mlp"]),
        _ => Err(config.wrong(COUNT, "1, or 2 in the new decoder architecture")),
    }
}
