//! A file of predictors whose thresholds are still to be found.
//!
//! It is written beside where it will be, one tensor in memory at a time. Then its scores are computed by the code that
//! models run it with, one layer in memory at a time, so that thresholds and measures are for exactly those. The last step
//! writes it again with what was found in its header.
//!
//! Not here: what the tensors hold (`gate`, `quantize`), how often a threshold finds what it should (`threshold`).

use std::path::{Path, PathBuf};

use candle::Tensor;
use candle_wick::{FlashFolder, IoOptions, Predictor, PredictorMetadata};
use tempfile::TempDir;
use wick_format::{Manifest, TensorSpec};

use super::cut::Cut;
use super::observed::{deciding, LayerInputs, Observed};
use super::threshold::{Counts, LayerQuality, Truth};
use super::{file, model_error, FitOptions, FitProgress};
use crate::ConvertError;

/// Tokens whose scores are computed together.
const ROWS: usize = 128;

/// The file, and the model's folder opened with it.
pub(super) struct Draft {
    /// Removed when dropped.
    _place: TempDir,
    path: PathBuf,
    folder: FlashFolder,
    metadata: PredictorMetadata,
    specs: Vec<TensorSpec>,
}

/// Metadata of `kind`'s form, input, maker and so on, of which nothing was measured.
pub(super) fn unmeasured(kind: PredictorMetadata, manifest: &Manifest) -> PredictorMetadata {
    let nothing = || vec![0.0; manifest.layers.len()];
    PredictorMetadata {
        model_hash: manifest.neurons_hash().to_owned(),
        thresholds: nothing(),
        recall: nothing(),
        selected_fraction: nothing(),
        union_fraction: nothing(),
        windows: None,
        ..kind
    }
}

impl Draft {
    /// Writes the tensors `specs` for the converted folder `model`, in the folder where `out` will be; `content(index)` gives
    /// the bytes of `specs[index]`, and is called once for each, in order.
    pub(super) fn write(
        model: &Path,
        out: &Path,
        metadata: PredictorMetadata,
        specs: Vec<TensorSpec>,
        content: &dyn Fn(usize) -> Result<Vec<u8>, ConvertError>,
    ) -> Result<Self, ConvertError> {
        let (beside, _) = file::place(out)?;
        let place = tempfile::Builder::new()
            .prefix(".predictors-")
            .tempdir_in(beside)
            .map_err(ConvertError::io(beside, "write to"))?;
        let path = place.path().join("draft.safetensors");
        file::write(&path, &metadata, &specs, content)?;
        let folder = FlashFolder::open_with(model, IoOptions::default(), Some(&path));
        Ok(Self {
            folder: folder.map_err(candle_wick_models::Error::from)?,
            _place: place,
            path,
            metadata,
            specs,
        })
    }

    /// The threshold of each layer that keeps the wanted recall on the tokens that are there for it, and what it selects on
    /// those that are there for that.
    pub(super) fn measure_all(
        &self,
        observed: &Observed,
        options: &FitOptions,
        progress: &dyn Fn(FitProgress),
    ) -> Result<Vec<LayerQuality>, ConvertError> {
        observed.for_each_layer(options, progress, |index, layer| {
            let (weight, bias) = deciding(&observed.folder, layer).map_err(model_error)?;
            let truth = Truth {
                weight: &weight,
                bias: &bias,
                activation: observed.activation,
            };
            let tune = observed.all_inputs(index, &observed.parts.tune)?;
            let measure = observed.all_inputs(index, &observed.parts.measure)?;
            self.measure(index, &truth, [&tune, &measure], options.recall)
        })
    }

    /// The threshold of layer `index` that keeps `recall` of what is active on `tune`, and what it selects on `measure`.
    fn measure(
        &self,
        index: usize,
        truth: &Truth<'_>,
        [tune, measure]: [&LayerInputs; 2],
        recall: f64,
    ) -> Result<LayerQuality, ConvertError> {
        let predictor = Predictor::load(&self.folder, index);
        let predictor = predictor.map_err(candle_wick_models::Error::from)?;
        let is_active = |exact: &f32| truth.activation.is_active(*exact);
        let cut = Cut::find(recall, |pass| {
            for_each_token(&predictor, truth, tune, |scores, exact| {
                for (score, exact) in scores.iter().zip(exact) {
                    pass.push(*score, is_active(exact));
                }
            })
        });
        let threshold = cut.map_err(model_error)?.threshold;
        let mut counts = Counts::new(truth.weight.dim(0).map_err(model_error)?);
        let count = |scores: &[f32], exact: &[f32]| {
            let is_selected = scores.iter().map(|score| *score >= threshold);
            counts.push(is_selected.zip(exact.iter().map(is_active)));
        };
        for_each_token(&predictor, truth, measure, count).map_err(model_error)?;
        Ok(counts.quality(threshold))
    }

    /// The model's folder with the predictors.
    pub(super) fn folder(&self) -> &FlashFolder {
        &self.folder
    }

    /// What the predictors take in DRAM.
    pub(super) fn dram_bytes(&self) -> u64 {
        self.folder.predictor_bytes()
    }

    /// Writes the file to `out`, with what was found of each layer; gives its size.
    pub(super) fn finish(
        mut self,
        out: &Path,
        layers: &[LayerQuality],
    ) -> Result<u64, ConvertError> {
        let of = |value: fn(&LayerQuality) -> f32| layers.iter().map(value).collect();
        self.metadata.thresholds = of(|quality| quality.threshold);
        self.metadata.recall = of(|quality| quality.recall);
        self.metadata.selected_fraction = of(|quality| quality.selected_fraction);
        self.metadata.union_fraction = of(|quality| quality.union_fraction);
        self.metadata.windows = Some(layers.iter().map(|quality| quality.windows).collect());
        file::write_again(&self.path, out, &self.metadata, &self.specs)
    }
}

/// Calls `each(scores, pre-activations)` with `(intermediate)` values of every token of `x`.
fn for_each_token(
    predictor: &Predictor,
    truth: &Truth<'_>,
    x: &LayerInputs,
    mut each: impl FnMut(&[f32], &[f32]),
) -> candle::Result<()> {
    let (tokens, neurons) = (x.ffn.dim(0)?, truth.weight.dim(0)?);
    for start in (0..tokens).step_by(ROWS) {
        let count = ROWS.min(tokens - start);
        let rows = |x: &Tensor| x.narrow(0, start, count)?.contiguous();
        let exact = truth.pre_activations(&rows(&x.ffn)?)?;
        let exact = exact.flatten_all()?.to_vec1::<f32>()?;
        let seen = rows(&x.seen)?.flatten_all()?.to_vec1::<f32>()?;
        let scores = predictor.scores(&seen)?;
        for (scores, exact) in scores.chunks(neurons).zip(exact.chunks(neurons)) {
            each(scores, exact);
        }
    }
    Ok(())
}
