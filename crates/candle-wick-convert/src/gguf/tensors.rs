//! llama.cpp's names to Hugging Face's, and the order of rows where the two differ.
//!
//! - llama: rows of q and k are permuted so that the halves of a head lie in pairs of neighbours;
//! - falcon: the fused matrix has all queries, all keys, all values, not one group after the other;
//! - phi2: older files have one matrix with all of q, k and v, as the first Hugging Face uploads (`family::phi` splits it);
//! - persimmon, qwen2: as in Hugging Face.

use super::config::Model;
use super::metadata::Described;
use super::rope::DIVISORS;
use super::Architecture;
use crate::source::{RowOrder, SourceFolder};
use crate::ConvertError;

/// What the tensors of an architecture are called.
struct Names {
    embedding: &'static str,
    norm: &'static str,
    /// Prefix of the layers.
    layers: &'static str,
    /// The parts of a layer: llama.cpp's name, Hugging Face's.
    parts: &'static [(&'static str, &'static str)],
}

const LLAMA: Names = Names {
    embedding: "model.embed_tokens",
    norm: "model.norm",
    layers: "model.layers",
    parts: &[
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ],
};

const FALCON: Names = Names {
    embedding: "transformer.word_embeddings",
    norm: "transformer.ln_f",
    layers: "transformer.h",
    parts: &[
        ("attn_norm", "input_layernorm"),
        ("attn_qkv", "self_attention.query_key_value"),
        ("attn_output", "self_attention.dense"),
        ("ffn_up", "mlp.dense_h_to_4h"),
        ("ffn_down", "mlp.dense_4h_to_h"),
    ],
};

/// Falcon with two norms.
const FALCON_40B: Names = Names {
    parts: &[
        ("attn_norm", "ln_mlp"),
        ("attn_norm_2", "ln_attn"),
        ("attn_qkv", "self_attention.query_key_value"),
        ("attn_output", "self_attention.dense"),
        ("ffn_up", "mlp.dense_h_to_4h"),
        ("ffn_down", "mlp.dense_4h_to_h"),
    ],
    ..FALCON
};

const PHI2: Names = Names {
    embedding: "model.embed_tokens",
    norm: "model.final_layernorm",
    layers: "model.layers",
    parts: &[
        ("attn_norm", "input_layernorm"),
        ("attn_qkv", "self_attn.Wqkv"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.dense"),
        ("ffn_up", "mlp.fc1"),
        ("ffn_down", "mlp.fc2"),
    ],
};

const PERSIMMON: Names = Names {
    embedding: "model.embed_tokens",
    norm: "model.final_layernorm",
    layers: "model.layers",
    parts: &[
        ("attn_norm", "input_layernorm"),
        ("attn_qkv", "self_attn.query_key_value"),
        ("attn_q_norm", "self_attn.q_layernorm"),
        ("attn_k_norm", "self_attn.k_layernorm"),
        ("attn_output", "self_attn.dense"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_up", "mlp.dense_h_to_4h"),
        ("ffn_down", "mlp.dense_4h_to_h"),
    ],
};

/// What becomes of a tensor: its name in the file, that in the model, the order of its rows.
type Move = (String, String, RowOrder);

/// Finds out what the tensors of the file are; those that are unknown keep their names.
pub(super) fn moves(metadata: &Described<'_>, model: &Model) -> Vec<Move> {
    let names = match metadata.architecture {
        Architecture::Llama | Architecture::Qwen2 => LLAMA,
        Architecture::Falcon if metadata.has("blk.0.attn_norm_2.weight") => FALCON_40B,
        Architecture::Falcon => FALCON,
        Architecture::Phi2 => PHI2,
        Architecture::Persimmon => PERSIMMON,
    };
    let tensors = metadata.source.names();
    let moved = tensors.filter_map(|name| {
        let (stem, kind) = name.rsplit_once('.')?;
        let (current, order) = match layer_and_part(stem) {
            Some((layer, part)) => {
                let (_, current) = names.parts.iter().find(|(known, _)| *known == part)?;
                let order = row_order(metadata.architecture, part, model);
                (format!("{}.{layer}.{current}", names.layers), order)
            }
            None => (names.outside_layers(stem)?.to_string(), RowOrder::Same),
        };
        Some((name.to_string(), format!("{current}.{kind}"), order))
    });
    moved.collect()
}

/// Gives the tensors their names and orders. What became part of the config is no tensor any more.
pub(super) fn apply(moves: Vec<Move>, source: &mut SourceFolder) -> Result<(), ConvertError> {
    for (name, current, order) in moves {
        source.rename(&name, current, order)?;
    }
    source.forget(DIVISORS);
    Ok(())
}

impl Names {
    fn outside_layers(&self, stem: &str) -> Option<&'static str> {
        match stem {
            "token_embd" => Some(self.embedding),
            "output_norm" => Some(self.norm),
            "output" => Some("lm_head"),
            _ => None,
        }
    }
}

/// `7` and `attn_q` of `blk.7.attn_q`.
fn layer_and_part(stem: &str) -> Option<(usize, &str)> {
    let (layer, part) = stem.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

fn row_order(architecture: Architecture, part: &str, model: &Model) -> RowOrder {
    let head_rows = model.head_dim;
    match (architecture, part) {
        (Architecture::Llama, "attn_q" | "attn_k") => RowOrder::RotaryPairs { head_rows },
        (Architecture::Falcon, "attn_qkv") if model.kv_heads > 1 => RowOrder::SeparatedGroups {
            groups: model.kv_heads,
            queries: model.heads / model.kv_heads,
            head_rows,
        },
        _ => RowOrder::Same,
    }
}
