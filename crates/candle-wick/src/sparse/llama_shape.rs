//! The models that candle's quantized Llama can be when it is built by `from_ggml`.
//!
//! That constructor knows what ggml's first files could say: a rotary base of 10000 without scaling, norms with 1e-5, SiLU, no biases
//! (Llama 2, TinyLlama). Other configs are refused, for it would compute something else.

use candle::quantized::ggml_file::HParams;
use serde_json::Value;

use super::facts::{refused, StockFacts};
use crate::activation::Activation;
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
            let reason = format!("{reason}, which candle's ModelWeights::from_ggml cannot be told");
            Err(refused(folder, reason))
        };
        let mut tensors = folder.resident_tensors();
        if let Some((name, _)) = tensors.find(|(name, _)| name.ends_with(".bias")) {
            return fail(format!("there is a {name}"));
        }
        if let Some(reason) = unlike_ggml(config) {
            return fail(reason);
        }
        let size = |key: &str| config.get(key).and_then(Value::as_u64).unwrap_or(0) as usize;
        let (hidden, heads) = (size("hidden_size"), size("num_attention_heads"));
        let kv_heads = match size("num_key_value_heads") {
            0 => heads,
            kv_heads => kv_heads,
        };
        let head_dim = size("head_dim");
        // Halves of a head are interleaved.
        if heads == 0 || hidden % heads != 0 || (hidden / heads) % 2 != 0 || heads % kv_heads != 0 {
            let sizes = format!("hidden_size {hidden} of {heads} heads, {kv_heads} for keys");
            return fail(sizes);
        }
        if head_dim != 0 && head_dim != hidden / heads {
            return fail(format!("head_dim is {head_dim}"));
        }
        let embedding = folder.extent(EMBEDDING);
        let embedding = embedding.ok_or_else(|| folder.missing(EMBEDDING))?;
        Ok(Self {
            hidden,
            heads,
            kv_heads,
            vocab: embedding.shape.first().copied().unwrap_or(0),
        })
    }

    pub(super) fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// What a file would begin with.
    pub(super) fn hparams(&self, layers: usize) -> HParams {
        // All of them are sizes of tensors that are there.
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
        Ok(StockFacts {
            activation: Activation::Silu,
            head_apart: true,
            // Sines, cosines, and the table that they are made of: half a head each.
            rope_bytes: 6 * POSITIONS * self.head_dim() as u64,
            ..StockFacts::of_config(folder, config)?
        })
    }
}

/// What in a config candle's constructor cannot be told.
fn unlike_ggml(config: &Value) -> Option<String> {
    let text = |key: &str| config.get(key).and_then(Value::as_str);
    let rope = config.get("rope_parameters").unwrap_or(&Value::Null);
    let number = |key: &str, unsaid: f64| {
        let said = config.get(key).or_else(|| rope.get(key));
        said.and_then(Value::as_f64).unwrap_or(unsaid)
    };
    let model_type = text("model_type").unwrap_or_default();
    let activation = text("hidden_act").unwrap_or("silu");
    let (theta, eps) = (
        number("rope_theta", ROPE_THETA),
        number("rms_norm_eps", 1e-6),
    );
    let scaling = config
        .get("rope_scaling")
        .filter(|scaling| !scaling.is_null());
    let scaling = scaling.or_else(|| rope.get("rope_type").filter(|kind| *kind != "default"));
    if model_type != "llama" {
        Some(format!("model_type is {model_type:?}"))
    } else if activation != "silu" {
        Some(format!("hidden_act is {activation:?}"))
    } else if theta != ROPE_THETA {
        Some(format!("rope_theta is {theta}"))
    } else if let Some(scaling) = scaling {
        Some(format!("the rotary embedding is scaled by {scaling}"))
    } else if (eps / RMS_NORM_EPS - 1.0).abs() > 1e-6 {
        Some(format!("rms_norm_eps is {eps:?}"))
    } else {
        None
    }
}
