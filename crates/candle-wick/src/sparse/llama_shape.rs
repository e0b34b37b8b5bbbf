//! The models that candle's quantized Llama can be when it is built by `from_ggml`.
//!
//! That constructor knows what ggml's first files could say: a rotary base of 10000 without scaling, norms with 1e-5, SiLU, no biases
//! (Llama 2, TinyLlama). Other configs are refused, for it would compute something else; so are those that say the same in a way that is
//! not understood here.

use candle::quantized::ggml_file::HParams;
use serde_json::Value;

use super::facts::{refused, StockFacts, StructKind};
use super::is_bias;
use crate::error::Result;
use crate::folder::FlashFolder;

/// What candle's constructor has built in.
const ROPE_THETA: f64 = 10_000.0;
const RMS_NORM_EPS: f64 = 1e-5;
/// Positions that its tables are for.
const POSITIONS: u64 = 4096;

pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// The sizes that candle asks for.
pub(super) struct LlamaShape {
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) vocab: usize,
}

impl LlamaShape {
    /// That of a folder's model.
    ///
    /// # Errors
    /// Candle's quantized Llama would compute something else than this model.
    pub(super) fn of(folder: &FlashFolder, config: &Value) -> Result<Self> {
        let fail = |reason: String| {
            let reason = format!(
                "{reason}, which candle's ModelWeights::from_ggml cannot be told: FlashVarBuilder::sparse and our own definitions can"
            );
            Err(refused(folder, reason))
        };
        if let Some(reason) = unlike_ggml(config) {
            return fail(reason);
        }
        let mut tensors = folder.resident_tensors();
        if let Some((name, _)) = tensors.find(|(name, _)| is_bias(name)) {
            return fail(format!("there is a {name}"));
        }
        let extent = folder.extent(EMBEDDING);
        let extent = extent.ok_or_else(|| folder.missing(EMBEDDING))?;
        let size = |key: &str| config.get(key).and_then(Value::as_u64).unwrap_or(0);
        let hidden = size("hidden_size");
        let (vocab, columns) = match *extent.shape {
            [vocab, columns] => (vocab, columns),
            _ => (0, 0),
        };
        if columns as u64 != hidden || u32::try_from(vocab.max(columns)).is_err() {
            let shape = &extent.shape;
            let reason = format!("hidden_size is {hidden}, {EMBEDDING} is {shape:?}");
            return Err(refused(folder, reason));
        }
        let heads = size("num_attention_heads");
        let kv_heads = match size("num_key_value_heads") {
            0 => heads,
            kv_heads => kv_heads,
        };
        // Halves of a head are interleaved.
        if heads == 0 || hidden % heads != 0 || (hidden / heads) % 2 != 0 || heads % kv_heads != 0 {
            let sizes = format!("hidden_size {hidden} of {heads} heads, {kv_heads} for keys");
            return fail(sizes);
        }
        let head_dim = size("head_dim");
        if head_dim != 0 && head_dim != hidden / heads {
            return fail(format!("head_dim is {head_dim}"));
        }
        Ok(Self {
            hidden: columns,
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            vocab,
        })
    }

    pub(super) fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// What a file would begin with.
    pub(super) fn hparams(&self, layers: usize) -> HParams {
        // Each is at most a size of the embedding, which was found to fit; there is an FFN in memory for each layer.
        HParams {
            n_vocab: self.vocab as u32,
            n_embd: self.hidden as u32,
            n_mult: 1,
            n_head: self.heads as u32,
            n_layer: layers as u32,
            n_rot: self.head_dim() as u32,
            ftype: 0,
        }
    }

    /// What is planned for.
    pub(super) fn facts(&self, folder: &FlashFolder, config: &Value) -> Result<StockFacts> {
        let mut facts = StockFacts::of(folder, config)?;
        facts.kind = StructKind::QuantizedLlama;
        // Sines, cosines, and the angles that they are made of: half a head each.
        facts.rope_bytes = 6 * POSITIONS * self.head_dim() as u64;
        Ok(facts)
    }
}

/// What is under `key`, if it is something.
fn said<'a>(table: &'a Value, key: &str) -> Option<&'a Value> {
    table.get(key).filter(|value| !value.is_null())
}

/// What in a config candle's constructor cannot be told.
fn unlike_ggml(config: &Value) -> Option<String> {
    let unlike = |key: &str, value: &Value| Some(format!("{key} is {value}"));
    match said(config, "model_type") {
        Some(Value::String(model_type)) if model_type == "llama" => {}
        other => return unlike("model_type", other.unwrap_or(&Value::Null)),
    }
    match said(config, "hidden_act") {
        Some(activation) if activation != "silu" => return unlike("hidden_act", activation),
        _ => {}
    }
    if let Some(scaling) = said(config, "rope_scaling") {
        return unlike("rope_scaling", scaling);
    }
    let rope = config.get("rope_parameters").unwrap_or(&Value::Null);
    for theta in [said(config, "rope_theta"), said(rope, "rope_theta")] {
        match theta {
            Some(theta) if theta.as_f64() != Some(ROPE_THETA) => {
                return unlike("rope_theta", theta)
            }
            _ => {}
        }
    }
    // Nothing but the base and the kind that has nothing else.
    for (key, value) in rope.as_object().into_iter().flatten() {
        let is_plain = match key.as_str() {
            "rope_theta" => true,
            "rope_type" | "type" => value == "default",
            _ => value.is_null(),
        };
        if !is_plain {
            return unlike(&format!("rope_parameters.{key}"), value);
        }
    }
    let unsaid = Value::from(1e-6);
    let eps = said(config, "rms_norm_eps").unwrap_or(&unsaid);
    // A config made from one in f32 says 9.99999974737e-06.
    let is_near = |eps: f64| (eps / RMS_NORM_EPS - 1.0).abs() < 1e-6;
    match eps.as_f64().is_some_and(is_near) {
        true => None,
        false => unlike("rms_norm_eps", eps),
    }
}
