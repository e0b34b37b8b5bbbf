//! Predictors: which neurons a ReLU-family layer needs. Made in closed form (`fit`), trained (`train`),
//! imported (`import`), and judged (`evaluate`).
//!
//! `fit` runs the model over a text, keeps every FFN's inputs, and for each layer takes the best low-rank
//! approximation of the deciding matrix (`factor`), then the threshold that reaches the asked recall on a part
//! of the text that the fit has not seen, and measures on another such part. The result is
//! `predictors.safetensors` in the model's folder, or a file elsewhere, replaced as a whole.

mod capture;
mod cost;
mod cut;
mod draft;
mod evaluate;
#[cfg(test)]
mod example_layer;
mod factor;
pub(crate) mod file;
mod foreign;
mod gate;
mod import;
mod labels;
mod observed;
mod parts;
mod place;
mod quantize;
mod random;
mod record;
mod start;
mod tally;
mod threshold;
mod train;
mod trainee;
mod work;

use std::path::{Path, PathBuf};

use candle::DType;
use candle_wick::{Between, Memory, PredictorForm, PredictorInput, PredictorMetadata};
use candle_wick_models::Interrupt;
use wick_format::{FfnLayer, Manifest, PredictorPart};

use crate::ConvertError;
pub use evaluate::{evaluate, Evaluation, LayerEvaluation};
use factor::Factors;
pub use gate::{gate, GateReport};
pub use import::{import, ImportOptions, ImportReport};
use observed::{deciding, open, Observed, Wanted};
use place::place;
pub use quantize::{quantize, QuantizeReport};
pub use tally::{Bin, Quality};
pub use threshold::LayerQuality;
use threshold::Truth;
pub use train::{train, TrainOptions, TrainReport, TrainedLayer};

/// The tensors of a layer whose pair has 16-bit numbers.
const PAIR: [PredictorPart; 3] = PredictorPart::PAIR;

/// How to fit.
#[derive(Clone, Debug)]
pub struct FitOptions {
    /// Rank of each layer's predictor.
    pub rank: usize,
    /// Share of the truly active neurons that a threshold has to select.
    pub recall: f64,
    /// Tokens of the text to use at most, spread over it.
    pub tokens: usize,
    /// Budget of the model while it runs.
    pub memory: Option<Memory>,
    /// The file to write, by default the model's own.
    pub out: Option<PathBuf>,
    /// Stops the fit.
    pub interrupt: Interrupt,
}

impl Default for FitOptions {
    fn default() -> Self {
        Self {
            rank: 64,
            recall: 0.97,
            tokens: 65_536,
            memory: None,
            out: None,
            interrupt: Interrupt::new(),
        }
    }
}

/// How far a fit is: tokens while capturing, then layers.
#[derive(Clone, Copy, Debug)]
pub struct FitProgress {
    /// What is counted.
    pub step: &'static str,
    /// How many are done.
    pub done: usize,
    /// Of how many.
    pub total: usize,
}

/// What was fitted.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FitReport {
    /// The file written.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Rank of each layer's predictor.
    pub rank: usize,
    /// Tokens used for the fit, for the thresholds, and for the measures.
    pub tokens: [usize; 3],
    /// The measures, a layer each.
    pub layers: Vec<LayerQuality>,
}

/// Fits a predictor for each layer of the converted model on `text` and writes them into its folder.
pub fn fit(
    model: &Path,
    text: &Path,
    options: &FitOptions,
    progress: &dyn Fn(FitProgress),
) -> Result<FitReport, ConvertError> {
    check_recall(model, options)?;
    if options.rank == 0 {
        let problem = "needs a rank of at least 1".to_owned();
        return Err(problem_with(model, problem));
    }
    let path = place(model, options.out.as_deref())?;
    let folder = open(model, None)?;
    let layers = folder.manifest().layers.iter();
    let hidden = layers.map(|layer| layer.hidden_size).min();
    if hidden.is_some_and(|hidden| options.rank > hidden) {
        let problem = format!(
            "has a hidden size below the rank of {}: nothing to gain",
            options.rank
        );
        return Err(problem_with(model, problem));
    }
    let wanted = Wanted {
        input: PredictorInput::FfnInput,
        // The pair as it is found, and as it is rounded.
        layer_bytes: &|layer, _| 2 * pair_bytes(layer, options.rank),
    };
    let texts = [text.to_owned()];
    let observed = Observed::on(folder, &texts, options, &wanted, progress)?;
    let fitted = observed.for_each_layer(options, progress, |index, layer| {
        fit_layer(&observed, index, layer, options)
    })?;
    let bytes = write_fitted(&path, observed.manifest(), &fitted, "closed form")?;
    Ok(FitReport {
        path,
        bytes,
        rank: options.rank,
        tokens: observed.parts.counts(),
        layers: fitted.iter().map(|fitted| fitted.quality).collect(),
    })
}

/// Bytes of a pair of rank `rank` in f32.
fn pair_bytes(layer: &FfnLayer, rank: usize) -> u64 {
    4 * (rank * (layer.hidden_size + layer.intermediate_size)) as u64
}

/// Refuses a recall that no threshold can be chosen by.
fn check_recall(model: &Path, options: &FitOptions) -> Result<(), ConvertError> {
    if options.recall > 0.0 && options.recall <= 1.0 {
        return Ok(());
    }
    let problem = format!(
        "needs a recall above 0, at most 1, and not {}",
        options.recall
    );
    Err(problem_with(model, problem))
}

/// A layer's pair as the file will hold it, and what it is worth.
struct Fitted {
    rank: usize,
    /// Its tensors, in the order of the file.
    tensors: [Vec<u8>; PAIR.len()],
    quality: LayerQuality,
}

impl Fitted {
    fn of(factors: &Factors, quality: LayerQuality) -> candle::Result<Self> {
        let [down, up, bias] = PAIR.map(|part| factors.stored_bytes(part));
        Ok(Self {
            rank: factors.rank(),
            tensors: [down?, up?, bias?],
            quality,
        })
    }
}

/// Writes the file; gives its size.
fn write_fitted(
    path: &Path,
    manifest: &Manifest,
    fitted: &[Fitted],
    made_by: &str,
) -> Result<u64, ConvertError> {
    let of = |value: fn(&LayerQuality) -> f32| {
        let layers = fitted.iter();
        layers.map(|fitted| value(&fitted.quality)).collect()
    };
    let windows = fitted.iter().map(|fitted| fitted.quality.windows).collect();
    let metadata = PredictorMetadata {
        model_hash: manifest.neurons_hash().to_owned(),
        form: PredictorForm::LowRank,
        input: PredictorInput::FfnInput,
        between: Between::None,
        made_by: Some(made_by.to_owned()),
        thresholds: of(|quality| quality.threshold),
        recall: of(|quality| quality.recall),
        selected_fraction: of(|quality| quality.selected_fraction),
        union_fraction: of(|quality| quality.union_fraction),
        windows: Some(windows),
    };
    let ranks: Vec<usize> = fitted.iter().map(|fitted| fitted.rank).collect();
    let specs = file::pair_specs(manifest, &ranks);
    file::write(path, &metadata, &specs, &|index| {
        Ok(fitted[index / PAIR.len()].tensors[index % PAIR.len()].clone())
    })
}

fn problem_with(path: &Path, problem: String) -> ConvertError {
    ConvertError::Checkpoint {
        path: path.to_owned(),
        problem,
    }
}

fn model_error(error: candle::Error) -> ConvertError {
    candle_wick_models::Error::from(error).into()
}

fn fit_layer(
    observed: &Observed,
    index: usize,
    layer: &FfnLayer,
    options: &FitOptions,
) -> Result<Fitted, ConvertError> {
    let parts = &observed.parts;
    let (weight, bias) = deciding(&observed.folder, layer).map_err(model_error)?;
    let fit = observed.inputs(index, &parts.fit)?;
    // Thresholds are for the factors as they are stored.
    let factors = Factors::fit(&weight, &bias, &fit, options.rank)
        .and_then(|factors| factors.rounded(DType::F16))
        .map_err(model_error)?;
    drop(fit);
    let truth = Truth {
        weight: &weight,
        bias: &bias,
        activation: observed.activation,
    };
    let tune = observed.inputs(index, &parts.tune)?;
    let measure = observed.inputs(index, &parts.measure)?;
    let quality = truth
        .threshold(&factors, &tune, options.recall)
        .and_then(|threshold| truth.quality(&factors, &measure, threshold));
    Fitted::of(&factors, quality.map_err(model_error)?).map_err(model_error)
}
