//! From metadata to the `config.json` of the same model.
//!
//! | architecture | model_type | activation (llama.cpp has it in code) |
//! |---|---|---|
//! | llama | llama, with a sliding window mistral | silu |
//! | qwen2 | qwen2 | silu |
//! | falcon | falcon | gelu |
//! | phi2 | phi | gelu_new |
//! | persimmon | persimmon | relu2 |

use serde_json::{json, Map, Value};

use super::metadata::Described;
use super::{rope, Architecture};
use crate::ConvertError;

/// The sizes on which the tensors depend.
pub(super) struct Model {
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

impl Model {
    pub(super) fn of(metadata: &Described<'_>) -> Result<Self, ConvertError> {
        let hidden = metadata.size("embedding_length")?;
        let heads = metadata.size("attention.head_count")?;
        let kv_heads = metadata.find_size("attention.head_count_kv")?;
        let kv_heads = kv_heads.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of the {heads} heads");
            return Err(metadata.wrong("attention.head_count_kv", kv_heads.to_string(), expected));
        }
        let head_dim = match metadata.find_size("attention.key_length")? {
            Some(key_length) => key_length,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!("a divisor of the embedding length {hidden}");
                return Err(metadata.wrong("attention.head_count", heads.to_string(), expected));
            }
        };
        if !head_dim.is_multiple_of(2) {
            let got = head_dim.to_string();
            return Err(metadata.wrong("attention.key_length", got, "an even number"));
        }
        let value_length = metadata.find_size("attention.value_length")?;
        if let Some(other) = value_length.filter(|&length| length != head_dim) {
            let expected = format!("the key length {head_dim}");
            return Err(metadata.wrong("attention.value_length", other.to_string(), expected));
        }
        Ok(Self {
            hidden,
            heads,
            kv_heads,
            head_dim,
        })
    }
}

/// Keys and values of `config.json`.
pub(super) fn values(
    metadata: &Described<'_>,
    model: &Model,
) -> Result<Map<String, Value>, ConvertError> {
    let mut values = common(metadata, model)?;
    let own = match metadata.architecture {
        Architecture::Llama | Architecture::Qwen2 => llama(metadata, model)?,
        Architecture::Falcon => falcon(metadata, model)?,
        Architecture::Phi2 => json!({
            "model_type": "phi",
            "hidden_act": "gelu_new",
            "intermediate_size": metadata.size("feed_forward_length")?,
            "layer_norm_eps": metadata.float("attention.layer_norm_epsilon")?,
            "num_key_value_heads": model.kv_heads,
            "partial_rotary_factor": partial_rotary(metadata, model)?,
            "qk_layernorm": false,
        }),
        Architecture::Persimmon => json!({
            "model_type": "persimmon",
            "hidden_act": "relu2",
            "intermediate_size": metadata.size("feed_forward_length")?,
            "layer_norm_eps": metadata.float("attention.layer_norm_epsilon")?,
            "partial_rotary_factor": persimmon_rotary(metadata, model)?,
            "qk_layernorm": metadata.has("blk.0.attn_q_norm.weight"),
        }),
    };
    if let Value::Object(own) = own {
        values.extend(own);
    }
    Ok(values)
}

fn common(metadata: &Described<'_>, model: &Model) -> Result<Map<String, Value>, ConvertError> {
    let source = metadata.source;
    let Some(embedding) = source.get("token_embd.weight") else {
        return Err(ConvertError::MissingTensors {
            folder: source.path.clone(),
            total: source.names().count() + 1,
            names: vec!["token_embd.weight".into()],
        });
    };
    let theta = metadata.number("rope.freq_base")?.unwrap_or(10_000.0);
    let mut values = Map::new();
    let mut set = |key: &str, value: Value| values.insert(key.to_string(), value);
    set("hidden_size", model.hidden.into());
    set("num_hidden_layers", metadata.size("block_count")?.into());
    set("num_attention_heads", model.heads.into());
    set(
        "max_position_embeddings",
        metadata.size("context_length")?.into(),
    );
    set("vocab_size", embedding.rows().into());
    set(
        "tie_word_embeddings",
        (!metadata.has("output.weight")).into(),
    );
    set("rope_theta", theta.into());
    if let Some(scaling) = rope::scaling(metadata, model, theta)? {
        set("rope_scaling", scaling);
    }
    for key in ["bos_token_id", "eos_token_id"] {
        if let Some(id) = metadata.find_any::<u64>(&format!("tokenizer.ggml.{key}"))? {
            set(key, id.into());
        }
    }
    Ok(values)
}

fn llama(metadata: &Described<'_>, model: &Model) -> Result<Value, ConvertError> {
    if let Some(rotary) = metadata.find_size("rope.dimension_count")? {
        if rotary != model.head_dim {
            let expected = format!("the whole head, {}", model.head_dim);
            return Err(metadata.wrong("rope.dimension_count", rotary.to_string(), expected));
        }
    }
    let mut values = json!({
        "hidden_act": "silu",
        "intermediate_size": metadata.size("feed_forward_length")?,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": metadata.float("attention.layer_norm_rms_epsilon")?,
    });
    if model.head_dim * model.heads != model.hidden {
        values["head_dim"] = model.head_dim.into();
    }
    let window = metadata.find_size("attention.sliding_window")?;
    if metadata.architecture == Architecture::Qwen2 {
        values["model_type"] = "qwen2".into();
        values["use_sliding_window"] = window.is_some().into();
    } else {
        let model_type = if window.is_some() { "mistral" } else { "llama" };
        values["model_type"] = model_type.into();
        values["attention_bias"] = metadata.has("blk.0.attn_q.bias").into();
        values["mlp_bias"] = metadata.has("blk.0.ffn_gate.bias").into();
    }
    if let Some(window) = window {
        values["sliding_window"] = window.into();
    }
    Ok(values)
}

/// Which of the variants it is, the tensors tell: llama.cpp computes no ALiBi, no biases and no sequential blocks
/// for this architecture, so a file that needs them cannot be right.
fn falcon(metadata: &Described<'_>, model: &Model) -> Result<Value, ConvertError> {
    for tensor in ["blk.0.attn_qkv.bias", "blk.0.ffn_norm.weight"] {
        if metadata.has(tensor) {
            let got = format!("a falcon GGUF file with `{tensor}` (as of falcon-rw)");
            let supported = "the Hugging Face checkpoint of this model".into();
            return Err(ConvertError::Unsupported { got, supported });
        }
    }
    let two_norms = metadata.has("blk.0.attn_norm_2.weight");
    let multi_query = model.kv_heads == 1 && !two_norms;
    let norms = if two_norms { 2 } else { 1 };
    Ok(json!({
        "model_type": "falcon",
        "activation": "gelu",
        "alibi": false,
        "bias": false,
        "ffn_hidden_size": metadata.size("feed_forward_length")?,
        "layer_norm_epsilon": metadata.float("attention.layer_norm_epsilon")?,
        "multi_query": multi_query,
        "new_decoder_architecture": !multi_query,
        "num_kv_heads": model.kv_heads,
        "num_ln_in_parallel_attn": if multi_query { Value::Null } else { norms.into() },
        "parallel_attn": true,
    }))
}

/// The part of a head that rotates: `int(head_dim * part)` is the number in the file, as transformers rounds down.
fn partial_rotary(metadata: &Described<'_>, model: &Model) -> Result<f64, ConvertError> {
    let rotary = metadata.size("rope.dimension_count")?;
    if rotary > model.head_dim {
        let expected = format!("at most the head's {}", model.head_dim);
        return Err(metadata.wrong("rope.dimension_count", rotary.to_string(), expected));
    }
    let head_dim = model.head_dim as f64;
    let part = rotary as f64 / head_dim;
    Ok(if part * head_dim < rotary as f64 {
        part.next_up()
    } else {
        part
    })
}

/// As [`partial_rotary`]; but files of 2023 say the whole head, of which llama.cpp then turned half.
fn persimmon_rotary(metadata: &Described<'_>, model: &Model) -> Result<f64, ConvertError> {
    let part = partial_rotary(metadata, model)?;
    Ok(if part == 1.0 { 0.5 } else { part })
}
