//! What the families have in common: a config that can be planned for, and a model for one sequence.
//!
//! To add a family: a file with a type for each of the two traits, and a line in [`parse_config`].
//!
//! Not here: budgets and sequences (`load`), layers (`layers`, `rope`).

use candle::{IndexOp, Result, Tensor};
use candle_wick::{Activation, FlashVarBuilder, ModelNeeds};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::falcon::FalconConfig;
use crate::interrupt::Interrupt;
use crate::llama::LlamaConfig;
use crate::opt::OptConfig;
use crate::persimmon::PersimmonConfig;
use crate::phi::PhiConfig;

/// A decoder with its weights in DRAM and on flash, for one sequence.
pub trait CausalLm: Send + Sync {
    /// The normed hidden states `(1, seq, hidden_size)` of `input_ids` `(1, seq)`, whose first is at `position`.
    fn hidden_states(&mut self, input_ids: &Tensor, position: usize) -> Result<Tensor>;

    /// The head, on normed hidden states `(.., hidden_size)`: logits `(.., vocab_size)`.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor>;

    /// Forgets all but the first `positions` of the sequence; 0 starts a new one.
    fn truncate_kv_cache(&mut self, positions: usize);

    /// Logits `(1, vocab_size)` after the last of `input_ids` `(1, seq)`, whose first is at `position`.
    fn forward(&mut self, input_ids: &Tensor, position: usize) -> Result<Tensor> {
        let hidden = self.hidden_states(input_ids, position)?;
        let last = hidden.dim(1)? - 1;
        self.logits(&hidden.i((.., last))?)
    }
}

/// The keys of a `config.json` that a family obeys.
pub trait ModelConfig {
    /// Refuses what would divide by zero, does not fit together or is not supported; the error is a reason
    /// without the file's name.
    fn validate(&self) -> std::result::Result<(), String>;

    /// Decoder layers.
    fn num_hidden_layers(&self) -> usize;

    /// Whether its FFNs have a gate.
    fn is_gated(&self) -> bool;

    /// The longest context.
    fn max_position_embeddings(&self) -> usize;

    /// The activation of the FFNs.
    fn activation(&self) -> candle_wick::Result<Activation>;

    /// What to plan for.
    fn needs(&self, ctx: usize) -> ModelNeeds;

    /// Loads what the placement of `vb` keeps in DRAM, with room for `ctx` positions.
    fn load(
        &self,
        vb: FlashVarBuilder,
        ctx: usize,
        interrupt: Interrupt,
    ) -> Result<Box<dyn CausalLm>>;
}

/// The values of `model_type` that have a definition here.
const SUPPORTED: &str = "falcon, llama, mistral, opt, persimmon, phi, qwen2, sparsellama";

/// The config of a converted folder; the error is a reason without the file's name.
pub(crate) fn parse_config(json: &Value) -> std::result::Result<Box<dyn ModelConfig>, String> {
    let model_type = json.get("model_type").and_then(Value::as_str);
    let config: Box<dyn ModelConfig> = match model_type.unwrap_or_default() {
        "falcon" => parsed::<FalconConfig>(json)?,
        "llama" | "sparsellama" | "mistral" | "qwen2" => parsed::<LlamaConfig>(json)?,
        "opt" => parsed::<OptConfig>(json)?,
        "persimmon" => parsed::<PersimmonConfig>(json)?,
        "phi" => parsed::<PhiConfig>(json)?,
        other => {
            return Err(format!(
                "model_type \"{other}\" is not supported ({SUPPORTED} are)"
            ))
        }
    };
    config.validate()?;
    Ok(config)
}

/// The default of flags that are set unless a config says otherwise.
pub(crate) fn yes() -> bool {
    true
}

fn parsed<C: ModelConfig + DeserializeOwned + 'static>(
    json: &Value,
) -> std::result::Result<Box<C>, String> {
    serde_json::from_value(json.clone())
        .map(Box::new)
        .map_err(|error| match wrong_key::<C>(json, &error) {
            Some(key) => format!("{key}: {error}"),
            None => error.to_string(),
        })
}

/// The key whose value is the reason of `error`, which does not tell: without it there is none, or another one.
fn wrong_key<'a, C: DeserializeOwned>(
    json: &'a Value,
    error: &serde_json::Error,
) -> Option<&'a str> {
    let values = json.as_object()?;
    let is_reason = |key: &&String| {
        let mut others = values.clone();
        others.remove(*key);
        let parsed = serde_json::from_value::<C>(Value::Object(others));
        parsed.err().map(|other| other.to_string()) != Some(error.to_string())
    };
    values.keys().find(is_reason).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_of_another_type_are_named_by_their_keys() {
        let good = json!({
            "model_type": "falcon", "hidden_size": 8, "vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        });
        assert!(parse_config(&good).is_ok());
        for (key, value) in [
            ("alibi", json!(null)),
            ("layer_norm_epsilon", json!("small")),
            ("hidden_size", json!(8.5)),
            ("rope_scaling", json!({"type": "linear", "factor": "2"})),
        ] {
            let mut bad = good.clone();
            bad[key] = value;
            let reason = parse_config(&bad).err().unwrap();
            assert!(
                reason.starts_with(&format!("{key}: invalid type")),
                "{reason}"
            );
        }
        let reason = parse_config(&json!({"model_type": "falcon"}))
            .err()
            .unwrap();
        assert!(reason.contains("missing field"), "{reason}");
    }
}
