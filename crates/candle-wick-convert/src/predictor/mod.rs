//! Predictors: which neurons a ReLU-family layer needs. Made in closed form (`fit`), trained (`train`),
//! imported (`import`), and judged (`evaluate`).
//!
//! `fit` runs the model over a text, keeps every FFN's inputs, and for each layer takes the best low-rank
//! approximation of the deciding matrix (`factor`), then the threshold that reaches the asked recall on a part
//! of the text that the fit has not seen, and measures on another such part. The result is
//! `predictors.safetensors` in the model's folder, or a file elsewhere, replaced as a whole.

mod capture;
mod cost;
mod draft;
mod evaluate;
mod factor;
pub(crate) mod file;
mod foreign;
mod gate;
mod import;
mod labels;
mod place;
mod quantize;
mod record;
mod start;
mod tally;
mod threshold;
mod train;
mod trainee;
mod work;

use std::path::{Path, PathBuf};

use candle::{DType, Device, Tensor};
use candle_wick::{
    Between, Memory, PredictorForm, PredictorInput, PredictorMetadata, SelectorKind,
};
use candle_wick_models::{Interrupt, LoadOptions, LoadedModel, WickTokenizer};
use wick_format::{FfnLayer, Manifest};

use crate::ConvertError;
use capture::Capture;
pub use evaluate::{evaluate, Evaluation, LayerEvaluation};
use factor::Factors;
use file::Part;
pub use gate::{gate, GateReport};
pub use import::{import, ImportOptions, ImportReport};
use place::place;
pub use quantize::{quantize, QuantizeReport};
pub use tally::{Bin, Quality};
pub use threshold::LayerQuality;
use threshold::Truth;
pub use train::{train, TrainOptions, TrainReport, TrainedLayer};

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
    let texts = [text.to_owned()];
    let observed = Observed::on(model, &texts, options, progress)?;
    let hidden = observed
        .manifest()
        .layers
        .iter()
        .map(|layer| layer.hidden_size)
        .min();
    if hidden.is_some_and(|hidden| options.rank > hidden) {
        let problem = format!(
            "has a hidden size below the rank of {}: nothing to gain",
            options.rank
        );
        return Err(problem_with(model, problem));
    }
    let parts = Parts::of(observed.ids.len());
    let fitted = observed.for_each_layer(options, progress, |_, layer, x| {
        fit_layer(&observed.model, layer, x, &parts, options).map_err(model_error)
    })?;
    let bytes = write_fitted(&path, observed.manifest(), &fitted, "closed form")?;
    let tokens = [parts.fit, parts.tune, parts.measure];
    let layers = fitted.iter().map(|(_, quality)| *quality).collect();
    Ok(FitReport {
        path,
        bytes,
        rank: options.rank,
        tokens,
        layers,
    })
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

/// Measures the predictors in the model's folder on `text`; of `options`, rank and recall play no part.
pub fn measure(
    model: &Path,
    text: &Path,
    options: &FitOptions,
    progress: &dyn Fn(FitProgress),
) -> Result<Vec<LayerQuality>, ConvertError> {
    let texts = [text.to_owned()];
    let observed = Observed::on(model, &texts, options, progress)?;
    let predictors = observed
        .model
        .folder()
        .predictors()
        .map_err(candle_wick_models::Error::from)?;
    let Some(metadata) = predictors.cloned() else {
        return Err(problem_with(
            model,
            "has no predictors to measure".to_owned(),
        ));
    };
    let mut thresholds = metadata.thresholds.into_iter();
    observed.for_each_layer(options, progress, |_, layer, x| {
        let threshold = thresholds.next().unwrap_or(f32::MAX);
        measure_layer(&observed.model, layer, x, threshold).map_err(model_error)
    })
}

fn measure_layer(
    model: &LoadedModel,
    layer: &FfnLayer,
    x: &Tensor,
    threshold: f32,
) -> candle::Result<LayerQuality> {
    let (weight, bias) = deciding(model, layer)?;
    let factors = Factors::stored(&model.dense_weights(), layer)?;
    let truth = Truth {
        weight: &weight,
        bias: &bias,
        activation: model.activation(),
    };
    truth.quality(&factors, x, threshold)
}

/// Writes the file; gives its size.
fn write_fitted(
    path: &Path,
    manifest: &Manifest,
    fitted: &[(Factors, LayerQuality)],
    made_by: &str,
) -> Result<u64, ConvertError> {
    let of = |value: fn(&LayerQuality) -> f32| {
        fitted.iter().map(|(_, quality)| value(quality)).collect()
    };
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
        windows: Some(fitted.iter().map(|(_, quality)| quality.windows).collect()),
    };
    let content = |layer: usize, part: Part| {
        let (factors, _) = &fitted[layer];
        factors.stored_bytes(part).map_err(model_error)
    };
    let ranks = fitted.iter().map(|(factors, _)| factors.rank());
    let ranks: Vec<usize> = ranks.collect();
    file::write_low_rank(path, manifest, &metadata, &ranks, &content)
}

/// A model that ran over a text, and what its FFNs saw.
struct Observed {
    model: LoadedModel,
    capture: Capture,
    ids: Vec<u32>,
}

impl Observed {
    fn on(
        path: &Path,
        texts: &[PathBuf],
        options: &FitOptions,
        progress: &dyn Fn(FitProgress),
    ) -> Result<Self, ConvertError> {
        let load = LoadOptions {
            selector: Some(SelectorKind::Dense),
            memory: options.memory,
            interrupt: options.interrupt.clone(),
            ..LoadOptions::default()
        };
        let mut model = candle_wick_models::load(path, &load)?;
        let activation = model.activation();
        if !activation.is_relu_like() {
            let name = activation.name();
            let problem = "whose neurons are never exactly zero: nothing to predict";
            return Err(problem_with(
                path,
                format!("has activation {name}, {problem}"),
            ));
        }
        let ids = ids_of(path, texts, model.ctx(), options.tokens)?;
        let (tokens, done) = (ids.len(), std::cell::Cell::new(0));
        let capture = Capture::record(
            &mut model,
            path,
            &ids,
            PredictorInput::FfnInput,
            &|tokens_more| {
                done.set(done.get() + tokens_more);
                progress(FitProgress {
                    step: "tokens",
                    done: done.get(),
                    total: tokens,
                });
            },
        )?;
        Ok(Self {
            model,
            capture,
            ids,
        })
    }

    fn manifest(&self) -> &Manifest {
        self.model.folder().manifest()
    }

    /// Calls `each(index, layer, inputs)` for one layer after the other.
    fn for_each_layer<T>(
        &self,
        options: &FitOptions,
        progress: &dyn Fn(FitProgress),
        mut each: impl FnMut(usize, &FfnLayer, &Tensor) -> Result<T, ConvertError>,
    ) -> Result<Vec<T>, ConvertError> {
        let layers = &self.manifest().layers;
        let mut results = Vec::with_capacity(layers.len());
        for (index, layer) in layers.iter().enumerate() {
            if options.interrupt.is_triggered() {
                return Err(candle_wick_models::Error::Interrupted.into());
            }
            let inputs = self.capture.inputs(index, layer.hidden_size)?;
            results.push(each(index, layer, &inputs)?);
            progress(FitProgress {
                step: "layers",
                done: index + 1,
                total: layers.len(),
            });
        }
        Ok(results)
    }
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

/// How many tokens serve which purpose; they follow each other in the text.
struct Parts {
    fit: usize,
    tune: usize,
    measure: usize,
}

impl Parts {
    fn of(tokens: usize) -> Self {
        let (tune, measure) = (tokens / 10, tokens / 10);
        Self {
            fit: tokens - tune - measure,
            tune,
            measure,
        }
    }

    /// The inputs for each purpose, of all of them.
    fn split(&self, x: &Tensor) -> candle::Result<[Tensor; 3]> {
        Ok([
            x.narrow(0, 0, self.fit)?,
            x.narrow(0, self.fit, self.tune)?,
            x.narrow(0, self.fit + self.tune, self.measure)?,
        ])
    }
}

/// The ids of the texts, one after the other: whole blocks of the context, spread evenly over them when there are more
/// than wanted.
fn ids_of(
    model: &Path,
    texts: &[PathBuf],
    ctx: usize,
    tokens: usize,
) -> Result<Vec<u32>, ConvertError> {
    let tokenizer = WickTokenizer::load(model)?.ok_or_else(|| {
        problem_with(
            model,
            "has no tokenizer.json, which a text needs".to_owned(),
        )
    })?;
    let mut ids = Vec::new();
    for text in texts {
        let content = std::fs::read_to_string(text).map_err(ConvertError::io(text, "read"))?;
        ids.extend(tokenizer.encode(&content)?);
    }
    let (blocks, wanted) = (ids.len() / ctx, tokens.div_ceil(ctx));
    if blocks < 10 {
        let first = texts.first().map_or(model, PathBuf::as_path);
        let more = if texts.len() > 1 {
            "and the other texts have"
        } else {
            "has"
        };
        let problem = format!("{more} {} tokens, {} are needed", ids.len(), 10 * ctx);
        return Err(problem_with(first, problem));
    }
    let kept = wanted.clamp(10, blocks);
    let starts = (0..kept).map(|block| block * blocks / kept * ctx);
    Ok(starts
        .flat_map(|start| ids[start..start + ctx].iter().copied())
        .collect())
}

/// Weight and bias of the matrix that decides which neurons are active.
fn deciding(model: &LoadedModel, layer: &FfnLayer) -> candle::Result<(Tensor, Tensor)> {
    let dense = model.dense_weights();
    let (name, bias) = match &layer.gate {
        Some(gate) => (gate, &layer.gate_bias),
        None => (&layer.up, &layer.up_bias),
    };
    let weight = dense.get((layer.intermediate_size, layer.hidden_size), name)?;
    let bias = match bias {
        Some(name) => dense.get(layer.intermediate_size, name)?,
        None => Tensor::zeros(layer.intermediate_size, DType::F32, &Device::Cpu)?,
    };
    Ok((weight, bias))
}

fn fit_layer(
    model: &LoadedModel,
    layer: &FfnLayer,
    x: &Tensor,
    parts: &Parts,
    options: &FitOptions,
) -> candle::Result<(Factors, LayerQuality)> {
    let (weight, bias) = deciding(model, layer)?;
    let [fit, tune, measure] = parts.split(x)?;
    let factors = Factors::fit(&weight, &bias, &fit, options.rank)?;
    // Thresholds are for the factors as they are stored.
    let factors = factors.rounded(DType::F16)?;
    let truth = Truth {
        weight: &weight,
        bias: &bias,
        activation: model.activation(),
    };
    let threshold = truth.threshold(&factors, &tune, options.recall)?;
    let quality = truth.quality(&factors, &measure, threshold)?;
    Ok((factors, quality))
}
