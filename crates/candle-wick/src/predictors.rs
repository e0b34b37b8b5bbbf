//! What `predictors.safetensors` says of itself, beside the tensors.
//!
//! One low-rank pair a layer, `<mlp prefix>.predictor.down.weight` `(rank, hidden)` and
//! `<mlp prefix>.predictor.up.weight` `(intermediate, rank)` with `.up.bias` `(intermediate)`: neuron `i` is
//! selected when `(up (down x) + bias)_i >= threshold`. Lists have one number a layer.
//!
//! `union_by_window` and `fresh_by_window` are missing in files from before these were measured: everything works
//! without them, but nobody knows how often a cache of some size will miss.
//!
//! Not here: using them (`selector`), making them (`candle-wick-convert`).

use std::collections::BTreeMap;

use wick_format::Manifest;

/// Lengths of the windows of tokens that are measured.
pub const WINDOW_TOKENS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// What caches of different sizes are worth to a layer, as shares of its neurons: one that holds `union[i]` of them
/// holds what the last `WINDOW_TOKENS[i]` tokens selected, and misses `fresh[i]` for a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct WindowShares {
    /// Selected for any of the last so many tokens.
    pub union: [f32; WINDOW_TOKENS.len()],
    /// Selected for a token and for none of so many before it.
    pub fresh: [f32; WINDOW_TOKENS.len()],
}

/// The metadata of a predictor file.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictorMetadata {
    /// Hash of the model that they were made for: [`Manifest::neurons_hash`].
    pub model_hash: String,
    /// What they look at; only `ffn_input` is known: the FFN's own input.
    pub input: String,
    /// Activation between the two matrices; only `none` is known.
    pub between: String,
    /// Selected when the score reaches this.
    pub thresholds: Vec<f32>,
    /// Share of truly active neurons that were selected, on text not used for the fit.
    pub recall: Vec<f32>,
    /// Share of the layer's neurons selected per token, on the same text.
    pub selected_fraction: Vec<f32>,
    /// Share of the layer's neurons selected by any of 5 consecutive tokens: the need for slots.
    pub union_fraction: Vec<f32>,
    /// The same by the window's length, a layer each; `None` where it was not measured.
    pub windows: Option<Vec<WindowShares>>,
}

impl PredictorMetadata {
    /// As string pairs for a safetensors header.
    pub fn to_map(&self) -> BTreeMap<String, String> {
        let list = |values: &[f32]| {
            let texts: Vec<String> = values.iter().map(|value| format!("{value}")).collect();
            texts.join(" ")
        };
        let windows = self.windows.iter().flat_map(|windows| {
            let flat = |of: fn(&WindowShares) -> &[f32]| -> Vec<f32> {
                windows.iter().flat_map(of).copied().collect()
            };
            [
                ("union_by_window", list(&flat(|shares| &shares.union))),
                ("fresh_by_window", list(&flat(|shares| &shares.fresh))),
            ]
        });
        [
            ("model_hash", self.model_hash.clone()),
            ("input", self.input.clone()),
            ("between", self.between.clone()),
            ("thresholds", list(&self.thresholds)),
            ("recall", list(&self.recall)),
            ("selected_fraction", list(&self.selected_fraction)),
            ("union_fraction", list(&self.union_fraction)),
        ]
        .into_iter()
        .chain(windows)
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
    }

    /// Reads them back for the model of `manifest`; the error is a reason without the file's name.
    pub fn parse(map: &BTreeMap<String, String>, manifest: &Manifest) -> Result<Self, String> {
        let text = |key: &str| {
            map.get(key)
                .cloned()
                .ok_or(format!("metadata lacks \"{key}\""))
        };
        let layers = manifest.layers.len();
        let numbers = |key: &str, per_layer: usize| -> Result<Vec<f32>, String> {
            let text = text(key)?;
            let values: Result<Vec<f32>, _> = text.split_whitespace().map(str::parse).collect();
            let values =
                values.map_err(|_| format!("metadata \"{key}\" is not a list of numbers"))?;
            if values.len() != layers * per_layer || values.iter().any(|value| value.is_nan()) {
                let got = values.len();
                return Err(format!(
                    "metadata \"{key}\": {got} numbers for {layers} layers, or a NaN"
                ));
            }
            Ok(values)
        };
        let list = |key: &str| numbers(key, 1);
        let windows = match map.contains_key("union_by_window") {
            false => None,
            true => Some(windows(
                &numbers("union_by_window", WINDOW_TOKENS.len())?,
                &numbers("fresh_by_window", WINDOW_TOKENS.len())?,
            )),
        };
        let metadata = Self {
            model_hash: text("model_hash")?,
            input: text("input")?,
            between: text("between")?,
            thresholds: list("thresholds")?,
            recall: list("recall")?,
            selected_fraction: list("selected_fraction")?,
            union_fraction: list("union_fraction")?,
            windows,
        };
        if metadata.model_hash != manifest.neurons_hash() {
            let (made_for, here) = (&metadata.model_hash, manifest.neurons_hash());
            return Err(format!(
                "made for model {made_for}, this one is {here}: fit them again"
            ));
        }
        if metadata.input != "ffn_input" || metadata.between != "none" {
            let (input, between) = (&metadata.input, &metadata.between);
            return Err(format!(
                "input \"{input}\" with \"{between}\" between is not supported"
            ));
        }
        Ok(metadata)
    }

    /// Mean over the layers, 0 for none.
    pub fn mean(values: &[f32]) -> f32 {
        values.iter().sum::<f32>() / values.len().max(1) as f32
    }
}

/// A layer's shares from each run of numbers.
fn windows(union: &[f32], fresh: &[f32]) -> Vec<WindowShares> {
    let runs = |values: &[f32]| -> Vec<[f32; WINDOW_TOKENS.len()]> {
        let chunks = values.chunks_exact(WINDOW_TOKENS.len());
        chunks
            .map(|chunk| std::array::from_fn(|at| chunk[at].clamp(0.0, 1.0)))
            .collect()
    };
    let pairs = runs(union).into_iter().zip(runs(fresh));
    pairs
        .map(|(union, fresh)| WindowShares { union, fresh })
        .collect()
}
