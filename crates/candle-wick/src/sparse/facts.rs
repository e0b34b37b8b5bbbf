//! What candle's struct for a folder's config has and asks for.

use serde_json::Value;
use wick_format::TensorExtent;

use super::is_embedding;
use crate::activation::Activation;
use crate::error::{Error, Result};
use crate::folder::FlashFolder;

/// How a struct's weights pass products on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StructKind {
    /// Through wick-gemm, in the place of gemm.
    Patched,
    /// By themselves: candle's quantized Llama. Its head is a matrix beside the embedding, in a tied model as well.
    QuantizedLlama,
}

impl StructKind {
    /// Who plans for it.
    pub(super) fn constructor(self) -> &'static str {
        match self {
            Self::Patched => "for_stock",
            Self::QuantizedLlama => "for_quantized_llama",
        }
    }
}

/// What the config and the names of tensors say of a struct.
#[derive(Clone, Debug)]
pub(super) struct StockFacts {
    pub(super) activation: Activation,
    /// The config's activation, where candle's struct has another one whatever it is told.
    mismatch: Option<Activation>,
    /// The tensor of its head: the embedding's in a tied model.
    pub(super) head: String,
    pub(super) kind: StructKind,
    /// Its tables of rotary embeddings, for all positions that the config allows.
    pub(super) rope_bytes: u64,
}

impl StockFacts {
    /// Of the struct for `folder`, whose config is `config`.
    pub(super) fn of(folder: &FlashFolder, config: &Value) -> Result<Self> {
        let fail = |reason: String| refused(folder, reason);
        let text = |key: &str| config.get(key).and_then(Value::as_str);
        let model_type = text("model_type").unwrap_or_default();
        let keys = [
            "hidden_act",
            "hidden_activation",
            "activation_function",
            "activation",
        ];
        let said = keys.into_iter().find_map(text);
        let said = said.map(str::parse::<Activation>).transpose()?;
        let (activation, mismatch) = match (model_type, said) {
            // Theirs, whatever the config says.
            ("llama", said) => (
                Activation::Silu,
                said.filter(|said| *said != Activation::Silu),
            ),
            ("falcon", said) => (Activation::GeluNew, said.filter(|said| said.is_relu_like())),
            (_, Some(said)) => (said, None),
            (_, None) => return Err(fail(format!("it has none of {}", keys.join(", ")))),
        };
        let head = match folder.extent(HEAD) {
            Some(_) => HEAD.to_owned(),
            // Candle's Falcon knows no tied head; what it asks for is the embedding.
            None => embeddings(folder)
                .next()
                .map_or(String::new(), |(name, _)| name.clone()),
        };
        let number = |key: &str| config.get(key).and_then(Value::as_u64).unwrap_or(0);
        let (layers, stored) = (
            number("num_hidden_layers"),
            folder.manifest().layers.len() as u64,
        );
        if layers != stored {
            let reason = format!("num_hidden_layers is {layers}, the folder holds {stored} layers");
            return Err(fail(reason));
        }
        let heads = number("num_attention_heads");
        if heads == 0 {
            return Err(fail("num_attention_heads is 0 or no number".to_owned()));
        }
        let head_dim = match number("head_dim") {
            0 => number("hidden_size") / heads,
            head_dim => head_dim,
        };
        // Sines and cosines: of half a head each, and of one table more while they are made. Falcon has whole heads' in each layer.
        let (positions, tables) = match model_type {
            "falcon" => (FALCON_POSITIONS, 2 * layers + 3),
            "phi" => (number("max_position_embeddings"), layers + 1),
            _ => (number("max_position_embeddings"), 2),
        };
        let rope_bytes = [positions, head_dim, tables]
            .into_iter()
            .fold(4, u64::saturating_mul);
        Ok(Self {
            activation,
            mismatch,
            head,
            kind: StructKind::Patched,
            rope_bytes,
        })
    }
}

impl StockFacts {
    /// The activation that was `asked` for, or the struct's.
    ///
    /// # Errors
    /// Nobody asked, and the struct would compute another model than the folder's.
    pub(super) fn activation_for(
        &self,
        folder: &FlashFolder,
        asked: Option<Activation>,
    ) -> Result<Activation> {
        match (asked, self.mismatch) {
            (Some(asked), _) => Ok(asked),
            (None, None) => Ok(self.activation),
            (None, Some(mismatch)) => {
                let (said, has) = (mismatch.name(), self.activation.name());
                let reason = format!(
                    "the model's activation is {said}, candle's struct has {has} whatever it is told and would compute another model; \
                     SparseOptions::activation runs it nevertheless, and our own definitions have {said}"
                );
                Err(refused(folder, reason))
            }
        }
    }
}

/// The folder's config.
pub(super) fn read_config(folder: &FlashFolder) -> Result<Value> {
    serde_json::from_str(&folder.config_json()?).map_err(|error| refused(folder, error.to_string()))
}

/// What is wrong with the folder's config.
pub(super) fn refused(folder: &FlashFolder, reason: String) -> Error {
    Error::Folder {
        path: folder.path().join("config.json"),
        reason,
    }
}

/// Positions that candle's Falcon has tables for, whatever its config says.
const FALCON_POSITIONS: u64 = 5000;

/// Where stock structs look for their head.
pub(super) const HEAD: &str = "lm_head.weight";

/// The tensors that candle looks up by rows.
pub(super) fn embeddings(folder: &FlashFolder) -> impl Iterator<Item = (&String, &TensorExtent)> {
    let tensors = folder.resident_tensors();
    tensors.filter(|(name, extent)| extent.shape.len() > 1 && is_embedding(name))
}
