//! What `predictors.safetensors` says of itself, beside the tensors.
//!
//! A file has predictors of one kind, one a layer (docs/FORMAT.md has their tensors). Neuron `i` is selected when its
//! score reaches the layer's threshold. Lists have one number a layer.
//!
//! `union_by_window` and `fresh_by_window` are missing in files from before these were measured: everything works
//! without them, but nobody knows how often a cache of some size will miss.
//!
//! Not here: using them (`selector`), making them (`candle-wick-convert`).

use std::collections::BTreeMap;
use std::str::FromStr;

use wick_format::Manifest;

use crate::error::Error;
use crate::predictor_kind::{Between, PredictorForm, PredictorInput};

/// Lengths of the windows of tokens that are measured.
pub const WINDOW_TOKENS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Characters of `made_by` that are kept.
const MADE_BY_CHARS_MAX: usize = 120;

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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PredictorMetadata {
    /// Hash of the model that they were made for: [`Manifest::neurons_hash`].
    pub model_hash: String,
    /// How scores are computed.
    pub form: PredictorForm,
    /// What they are computed from.
    pub input: PredictorInput,
    /// What lies between the two matrices of a low-rank pair.
    pub between: Between,
    /// How they were made, in a few words for people; files from before this was written have none.
    pub made_by: Option<String>,
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
            ("form", self.form.name().to_owned()),
            ("input", self.input.name().to_owned()),
            ("between", self.between.name().to_owned()),
            ("thresholds", list(&self.thresholds)),
            ("recall", list(&self.recall)),
            ("selected_fraction", list(&self.selected_fraction)),
            ("union_fraction", list(&self.union_fraction)),
        ]
        .into_iter()
        .chain(windows)
        .chain(self.made_by.iter().map(|by| ("made_by", by.clone())))
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
            let is_share = key != "thresholds";
            match values
                .iter()
                .find(|value| is_share && !(0.0..=1.0).contains(*value))
            {
                Some(value) => Err(format!(
                    "metadata \"{key}\": {value} is no share, from 0 to 1"
                )),
                None => Ok(values),
            }
        };
        let list = |key: &str| numbers(key, 1);
        // First of all: of another model, nothing else need fit.
        let (made_for, here) = (text("model_hash")?, manifest.neurons_hash());
        if made_for != here {
            return Err(format!(
                "made for model {made_for}, this one is {here}: make them again"
            ));
        }
        let has_windows = ["union_by_window", "fresh_by_window"].map(|key| map.contains_key(key));
        let windows = match has_windows.contains(&true) {
            false => None,
            true => Some(windows(
                &numbers("union_by_window", WINDOW_TOKENS.len())?,
                &numbers("fresh_by_window", WINDOW_TOKENS.len())?,
            )),
        };
        let metadata = Self {
            model_hash: made_for,
            form: match map.get("form") {
                None => PredictorForm::LowRank,
                Some(name) => kind(name)?,
            },
            input: kind(&text("input")?)?,
            between: kind(&text("between")?)?,
            made_by: map.get("made_by").map(|by| one_line(by)),
            thresholds: list("thresholds")?,
            recall: list("recall")?,
            selected_fraction: list("selected_fraction")?,
            union_fraction: list("union_fraction")?,
            windows,
        };
        if metadata.form == PredictorForm::Gate && metadata.between != Between::None {
            let between = metadata.between;
            return Err(format!(
                "form gate has nothing between two matrices, the metadata says {between}"
            ));
        }
        Ok(metadata)
    }

    /// Mean over the layers, 0 for none.
    pub fn mean(values: &[f32]) -> f32 {
        values.iter().sum::<f32>() / values.len().max(1) as f32
    }
}

/// A kind by its name.
fn kind<T: FromStr<Err = Error>>(name: &str) -> Result<T, String> {
    name.parse().map_err(|error: Error| error.to_string())
}

/// What a file says of its maker, short enough and plain enough for a table.
fn one_line(text: &str) -> String {
    let plain = |c: &char| !c.is_control();
    text.chars().filter(plain).take(MADE_BY_CHARS_MAX).collect()
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
