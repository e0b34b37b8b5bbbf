//! An adapter as Hugging Face's peft saves it: `adapter_config.json`, and pairs of small matrices in `adapter_model.safetensors`.
//!
//! The pair of the module `M` is `base_model.model.M.lora_A.weight` `(rank, in)` and `...lora_B.weight` `(out, rank)`; what it adds to
//! `M.weight` `(out, in)` is `lora_alpha / r * B A`, by `lora_alpha / sqrt(r)` with `use_rslora` (peft, `LoraLayer`).
//!
//! Whatever else peft can train (DoRA, embeddings, biases, whole modules, ranks that differ by pattern) is refused: merged in part,
//! it would be another model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::read_f32;
use crate::source::{read_text, SourceFolder, SourceTensor};
use crate::ConvertError;

const CONFIG_FILE: &str = "adapter_config.json";
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// What peft puts before the names of the model that it wraps.
const PREFIX: &str = "base_model.model.";
/// Ways to begin that change the base model's weights too.
const CHANGES_BASE: [&str; 4] = ["pissa", "olora", "corda", "loftq"];

/// The pairs, by the names of the tensors that they change.
pub(super) struct Adapter {
    source: SourceFolder,
    pub(super) scaling: f32,
    pub(super) pairs: BTreeMap<String, Pair>,
}

/// The two factors of what is added to one matrix.
pub(super) struct Pair {
    /// `(rank, in)`.
    a: SourceTensor,
    /// `(out, rank)`.
    b: SourceTensor,
    pub(super) rank: usize,
}

impl Adapter {
    /// Opens the adapter in `folder`, and finds all that it changes in `model`.
    pub(super) fn open(folder: &Path, model: &SourceFolder) -> Result<Self, ConvertError> {
        let config = Config::read(folder.join(CONFIG_FILE))?;
        let path = folder.join(WEIGHTS_FILE);
        if !path.exists() {
            let problem = "does not exist; an adapter in another form is saved again by peft with safe_serialization";
            return Err(ConvertError::checkpoint(&path, problem));
        }
        let source = SourceFolder::safetensors_file(&path)?;
        let mut pairs = BTreeMap::new();
        for name in source.names() {
            let (module, is_a) = match (
                name.strip_suffix(".lora_A.weight"),
                name.strip_suffix(".lora_B.weight"),
            ) {
                (Some(module), _) => (module, true),
                (_, Some(module)) => (module, false),
                _ => {
                    let problem = format!(
                        "holds `{name}`, which is no part of a plain LoRA of linear layers"
                    );
                    return Err(ConvertError::checkpoint(&path, problem));
                }
            };
            let of = |part| {
                let other = format!("{module}.lora_{part}.weight");
                source.get(&other).cloned().ok_or_else(|| {
                    ConvertError::checkpoint(&path, format!("holds `{name}` and no `{other}`"))
                })
            };
            let (a, b) = (of("A")?, of("B")?);
            if is_a {
                let target = target(model, module, &path)?;
                let pair = Pair::new(a, b, &source, model, &target)?;
                if pair.rank as f64 != config.rank {
                    let problem = format!(
                        "holds `{name}` of rank {}, and {CONFIG_FILE} says {}",
                        pair.rank, config.rank
                    );
                    return Err(ConvertError::checkpoint(&path, problem));
                }
                if pairs.insert(target.clone(), pair).is_some() {
                    let problem = format!("changes `{target}` twice");
                    return Err(ConvertError::checkpoint(&path, problem));
                }
            }
        }
        if pairs.is_empty() {
            return Err(ConvertError::checkpoint(&path, "holds no pair of matrices"));
        }
        Ok(Self {
            source,
            scaling: config.scaling,
            pairs,
        })
    }

    /// Both factors of `pair` in f32, A first.
    pub(super) fn read(&self, pair: &Pair) -> Result<[Vec<f32>; 2], ConvertError> {
        let read = |tensor: &SourceTensor| read_f32(&self.source, tensor, 0..tensor.rows());
        Ok([read(&pair.a)?, read(&pair.b)?])
    }
}

/// The name of the checkpoint's tensor that a pair of the adapter's module changes. Some checkpoints are of the model without its
/// head, whose names lack a part.
fn target(model: &SourceFolder, module: &str, path: &Path) -> Result<String, ConvertError> {
    let name = module.strip_prefix(PREFIX).unwrap_or(module);
    let short = name.split_once('.').map_or(name, |(_, rest)| rest);
    let candidates = [format!("{name}.weight"), format!("{short}.weight")];
    let mut found = candidates.iter().filter(|name| model.get(name).is_some());
    found.next().cloned().ok_or_else(|| {
        let problem = format!(
            "changes `{}`, which {} does not have: it is an adapter of another model",
            candidates[0],
            model.path.display()
        );
        ConvertError::checkpoint(path, problem)
    })
}

impl Pair {
    fn new(
        a: SourceTensor,
        b: SourceTensor,
        source: &SourceFolder,
        model: &SourceFolder,
        target: &str,
    ) -> Result<Self, ConvertError> {
        let weight = model.get(target).expect("the target was found");
        let [out, input] = weight.shape[..] else {
            let got = format!("of shape {:?}", weight.shape);
            return Err(model.wrong(weight, got, "a matrix, as the adapter changes it"));
        };
        model.dtype(weight)?;
        let rank = a.rows();
        for (tensor, expected) in [(&a, [rank.max(1), input]), (&b, [out, rank])] {
            source.dtype(tensor)?;
            if tensor.shape != expected {
                let got = format!("of shape {:?}", tensor.shape);
                return Err(source.wrong(tensor, got, format!("{expected:?} beside `{target}`")));
            }
        }
        Ok(Self { a, b, rank })
    }
}

/// What of the config counts.
struct Config {
    /// Of every pair.
    rank: f64,
    scaling: f32,
}

impl Config {
    fn read(path: PathBuf) -> Result<Self, ConvertError> {
        let refuse = |problem: String| ConvertError::checkpoint(&path, problem);
        let config: Value = serde_json::from_str(&read_text(&path)?)
            .map_err(|error| refuse(format!("is no JSON: {error}")))?;
        let is_on = |key: &str| config.get(key).is_some_and(|value| !is_nothing(value));
        if config.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return Err(refuse("has no \"peft_type\": \"LORA\"".to_owned()));
        }
        for key in [
            "use_dora",
            "fan_in_fan_out",
            "modules_to_save",
            "rank_pattern",
            "alpha_pattern",
            "lora_bias",
            "trainable_token_indices",
            "layer_replication",
        ] {
            if is_on(key) {
                let value = &config[key];
                return Err(refuse(format!(
                    "has \"{key}\": {value}, and plain LoRA alone is merged"
                )));
            }
        }
        let bias = config.get("bias").and_then(Value::as_str).unwrap_or("none");
        if bias != "none" {
            return Err(refuse(format!(
                "has \"bias\": \"{bias}\", and biases are not merged"
            )));
        }
        let init = config.get("init_lora_weights").and_then(Value::as_str);
        let changes = |init: &str| {
            CHANGES_BASE
                .iter()
                .any(|way| init.to_lowercase().starts_with(way))
        };
        if let Some(init) = init.filter(|init| changes(init)) {
            return Err(refuse(format!(
                "was trained from \"{init}\", which changes the base model too"
            )));
        }
        let number = |key: &str| {
            let value = config.get(key).and_then(Value::as_f64);
            value
                .filter(|value| value.is_finite() && *value > 0.0)
                .ok_or_else(|| refuse(format!("has no \"{key}\" above zero")))
        };
        let (alpha, rank) = (number("lora_alpha")?, number("r")?);
        let is_rooted = config
            .get("use_rslora")
            .is_some_and(|value| !is_nothing(value));
        if is_rooted && config["use_rslora"] != Value::Bool(true) {
            let value = &config["use_rslora"];
            return Err(refuse(format!(
                "has \"use_rslora\": {value}, neither true nor false"
            )));
        }
        let divisor = if is_rooted { rank.sqrt() } else { rank };
        Ok(Self {
            rank,
            scaling: (alpha / divisor) as f32,
        })
    }
}

/// What stands for "not used" in a config.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}
