//! What a loaded model's selector is worth on a text: who was selected, against who was truly active.
//!
//! The model runs as it would for a user, so that the inputs of its layers are those of a model that leaves neurons out, and any
//! selector will do, low-rank or other.
//!
//! Not here: what the neurons would have given (`record`), counting (`tally`).

use candle_wick::release_free_heap;
use candle_wick_models::LoadedModel;
use serde::Serialize;

use super::record::Record;
use super::tally::{Bin, LayerTally, Quality, Tally};
use super::{problem_with, FitProgress};
use crate::ConvertError;

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Evaluation {
    /// Who chose the neurons.
    pub selector: &'static str,
    /// Tokens of the text, in sequences of the model's context.
    pub tokens: usize,
    /// Tokens whose neurons the simulated cache keeps.
    pub window: usize,
    /// Each layer.
    pub layers: Vec<LayerEvaluation>,
    /// All neurons of all layers.
    pub all: Quality,
    /// Bytes of records that a token reads in all layers.
    pub bytes_per_token: f64,
    /// Pre-activations of active neurons, in half octaves, of all layers.
    pub histogram: Vec<Bin>,
}

/// One layer.
#[derive(Clone, Debug, Serialize)]
pub struct LayerEvaluation {
    /// How many neurons it has.
    pub neurons: usize,
    /// What its selections were worth.
    #[serde(flatten)]
    pub quality: Quality,
    /// Bytes of records that a token reads when a cache keeps what the last tokens selected.
    pub bytes_per_token: f64,
}

/// Runs `model` over `ids` and judges what its selector chose; a cache that keeps what the last `window` tokens selected is
/// simulated beside. The model is let go of as soon as it has run.
///
/// # Errors
/// The model's neurons are never exactly zero, its selector takes all of them, or it fails; or temporary files cannot be written.
pub fn evaluate(
    mut model: LoadedModel,
    ids: &[u32],
    window: usize,
    progress: &dyn Fn(FitProgress),
) -> Result<Evaluation, ConvertError> {
    let activation = model.activation();
    if !activation.is_relu_like() {
        let problem = format!(
            "has activation {}, whose neurons are never exactly zero: none is missed or found",
            activation.name()
        );
        return Err(problem_with(model.folder().path(), problem));
    }
    let record = Record::of(&mut model, ids, progress)?;
    let (selector, folder) = (model.plan().selector.name(), model.folder().clone());
    drop(model);
    release_free_heap();
    let layer_count = folder.manifest().layers.len();
    let (mut all, mut layers) = (Tally::new(), Vec::with_capacity(layer_count));
    for (index, layer) in folder.manifest().layers.iter().enumerate() {
        let mut counts = LayerTally::new(layer.intermediate_size, window, activation);
        record.for_each_token(index, &mut |outcome| counts.push(outcome))?;
        let tally = counts.tally;
        let quality = tally.quality();
        layers.push(LayerEvaluation {
            neurons: layer.intermediate_size,
            quality,
            bytes_per_token: quality.read * layer.records_bytes() as f64,
        });
        all += &tally;
        progress(FitProgress {
            step: "layers",
            done: index + 1,
            total: layer_count,
        });
    }
    Ok(Evaluation {
        selector,
        tokens: ids.len(),
        window,
        bytes_per_token: layers.iter().map(|layer| layer.bytes_per_token).sum(),
        layers,
        all: all.quality(),
        histogram: all.histogram(),
    })
}
