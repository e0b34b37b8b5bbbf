//! Predictors that were trained elsewhere, in our file, with what they are worth on a text.
//!
//! They are measured in the model, by what its selector chooses with them: a file with the tensors is written beside the output,
//! the model runs with it, and the output gets the same tensors and the measures, which slots are planned by.

use std::path::{Path, PathBuf};

use candle_wick::{
    FlashFolder, IoOptions, Memory, PredictorForm, PredictorInput, PredictorMetadata, SelectorKind,
};
use candle_wick_models::{Interrupt, LoadOptions, LoadedModel};
use serde::Serialize;

use super::draft::Draft;
use super::foreign::Foreign;
use super::place::place;
use super::record::Record;
use super::threshold::Counts;
use super::{problem_with, FitProgress, LayerQuality};
use crate::ConvertError;

/// How to import.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// What the predictors were trained to look at; by default what their programs show them for such a model.
    pub input: Option<PredictorInput>,
    /// Scores that reach this select; by default what the files say, else 0.
    pub threshold: Option<f32>,
    /// Budget of the model while it runs.
    pub memory: Option<Memory>,
    /// The file to write, by default the model's own.
    pub out: Option<PathBuf>,
    /// Stops the run.
    pub interrupt: Interrupt,
}

/// What was imported.
#[derive(Clone, Debug, Serialize)]
pub struct ImportReport {
    /// The file written.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// The program that the predictors are from.
    pub made_by: &'static str,
    /// What they look at.
    pub input: &'static str,
    /// What lies between their matrices.
    pub between: &'static str,
    /// Rank of each layer's predictor.
    pub ranks: Vec<usize>,
    /// Tokens of the measures.
    pub tokens: usize,
    /// The measures, a layer each.
    pub layers: Vec<LayerQuality>,
}

/// Writes the predictors in the folder `from` into a file for `model`, with what they are worth on the tokens `ids`.
///
/// # Errors
/// The folder is not one of predictors for this model (`foreign`), the model's neurons are never exactly zero, a token is
/// unknown, or a disk refuses.
pub fn import(
    model: &Path,
    from: &Path,
    ids: &[u32],
    options: &ImportOptions,
    progress: &dyn Fn(FitProgress),
) -> Result<ImportReport, ConvertError> {
    if ids.is_empty() {
        return Err(problem_with(from, "cannot be measured on 0 tokens".into()));
    }
    let out = place(model, options.out.as_deref())?;
    let opened = FlashFolder::open(model, IoOptions::default());
    let manifest = opened.map_err(candle_wick_models::Error::from)?;
    let manifest = manifest.manifest();
    let foreign = Foreign::open(from, manifest)?;
    let input = options.input;
    let input = input.unwrap_or_else(|| foreign.maker.input(&manifest.model_type));
    let threshold = options.threshold.unwrap_or(foreign.threshold);
    let everywhere = |value| vec![value; manifest.layers.len()];
    let metadata = PredictorMetadata {
        model_hash: manifest.neurons_hash().to_owned(),
        form: PredictorForm::LowRank,
        input,
        between: foreign.maker.between(),
        made_by: Some(format!("imported from {}", foreign.maker.name())),
        thresholds: everywhere(threshold),
        // Until they are measured.
        recall: everywhere(1.0),
        selected_fraction: everywhere(1.0),
        union_fraction: everywhere(1.0),
        windows: None,
    };
    let specs = foreign.specs(manifest)?;
    let content = |index| foreign.content(index);
    let draft = Draft::write(model, &out, metadata, specs, &content)?;
    let layers = measure(draft.folder(), ids, threshold, options, progress)?;
    let bytes = draft.finish(&out, &layers)?;
    Ok(ImportReport {
        path: out,
        bytes,
        made_by: foreign.maker.name(),
        input: input.name(),
        between: foreign.maker.between().name(),
        ranks: foreign.ranks(),
        tokens: ids.len(),
        layers,
    })
}

/// What the predictors in `folder` are worth when its model runs with them.
fn measure(
    folder: &FlashFolder,
    ids: &[u32],
    threshold: f32,
    options: &ImportOptions,
    progress: &dyn Fn(FitProgress),
) -> Result<Vec<LayerQuality>, ConvertError> {
    let load = LoadOptions {
        selector: Some(SelectorKind::LowRank),
        memory: options.memory,
        interrupt: options.interrupt.clone(),
        ..LoadOptions::default()
    };
    let mut model = LoadedModel::load(folder.clone(), &load)?;
    let record = Record::of(&mut model, ids, progress)?;
    let activation = model.activation();
    drop(model);
    let layers = folder.manifest().layers.iter().enumerate();
    let quality = layers.map(|(index, layer)| {
        let mut counts = Counts::new(layer.intermediate_size);
        record.for_each_token(index, &mut |outcome| {
            let mut selected = outcome.selected.iter().peekable();
            let neurons = outcome.pre_activations.iter().enumerate();
            counts.push(neurons.map(|(neuron, value)| {
                let is_selected = selected.next_if_eq(&&(neuron as u32)).is_some();
                (is_selected, activation.is_active(*value))
            }));
        })?;
        Ok(counts.quality(threshold))
    });
    quality.collect()
}
