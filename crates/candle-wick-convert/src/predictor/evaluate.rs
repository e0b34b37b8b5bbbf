//! What a loaded model's selector is worth on a text: who was selected, against who was truly active.
//!
//! The model runs as it would for a user, so that the inputs of its layers are those of a model that leaves neurons out, and any
//! selector will do, low-rank or other. FFN inputs and selections go to temporary files; then each layer's own matrix says what
//! its neurons would have given, one layer in memory at a time.

use candle::Tensor;
use candle_wick::RecordedTrace;
use candle_wick_models::{record_trace, LoadedModel};
use serde::Serialize;
use wick_format::FfnLayer;

use super::capture::Capture;
use super::tally::{Bin, LayerTally, Quality, Tally, TokenOutcome};
use super::threshold::Truth;
use super::{deciding, model_error, problem_with, FitProgress};
use crate::ConvertError;

/// Tokens computed together.
const ROWS: usize = 256;

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
/// simulated beside.
///
/// # Errors
/// The model's neurons are never exactly zero, its selector takes all of them, or it fails; or temporary files cannot be written.
pub fn evaluate(
    model: &mut LoadedModel,
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
    let folder = std::env::temp_dir();
    let folder = tempfile::tempdir_in(&folder).map_err(ConvertError::io(&folder, "write to"))?;
    let path = folder.path().join("selections");
    let told = |step, done, total| progress(FitProgress { step, done, total });
    let capture = Capture::around(model, folder.path(), ids.len(), |model| {
        record_trace(model, ids, &path, &|done| told("tokens", done, ids.len()))?;
        Ok(())
    })?;
    let trace = RecordedTrace::open(&path).map_err(candle_wick_models::Error::from)?;
    let layer_count = model.folder().manifest().layers.len();
    let (mut all, mut layers) = (Tally::new(), Vec::with_capacity(layer_count));
    for (index, layer) in model.folder().manifest().layers.iter().enumerate() {
        let tally = judge(model, index, layer, &capture, &trace, window)?;
        let quality = tally.quality();
        layers.push(LayerEvaluation {
            neurons: layer.intermediate_size,
            quality,
            bytes_per_token: quality.read * layer.records_bytes() as f64,
        });
        all += &tally;
        told("layers", index + 1, layer_count);
    }
    Ok(Evaluation {
        selector: model.plan().selector.name(),
        tokens: ids.len(),
        window,
        bytes_per_token: layers.iter().map(|layer| layer.bytes_per_token).sum(),
        layers,
        all: all.quality(),
        histogram: all.histogram(),
    })
}

/// Counts one layer.
fn judge(
    model: &LoadedModel,
    index: usize,
    layer: &FfnLayer,
    capture: &Capture,
    trace: &RecordedTrace,
    window: usize,
) -> Result<Tally, ConvertError> {
    let selections = trace
        .layer(index)
        .map_err(candle_wick_models::Error::from)?;
    let x = capture.inputs(index, layer.hidden_size)?;
    let judged = || -> candle::Result<Tally> {
        let (weight, bias) = deciding(model, layer)?;
        let truth = Truth {
            weight: &weight,
            bias: &bias,
            activation: model.activation(),
        };
        let factor = UpFactor::of(model, layer)?;
        let threshold = truth.activation_threshold();
        let mut counts = LayerTally::new(layer.intermediate_size, window, threshold);
        for start in (0..selections.tokens()).step_by(ROWS) {
            let count = ROWS.min(selections.tokens() - start);
            let rows = x.narrow(0, start, count)?;
            let exact = truth.pre_activations(&rows)?.to_vec2::<f32>()?;
            let up = factor.as_ref().map(|up| up.apply(&rows)).transpose()?;
            for (token, pre_activations) in exact.iter().enumerate() {
                let mut coefficients: Vec<f32> = pre_activations
                    .iter()
                    .map(|value| truth.activation.apply(*value))
                    .collect();
                if let Some(up) = &up {
                    let factors = coefficients.iter_mut().zip(&up[token]);
                    factors.for_each(|(coefficient, up)| *coefficient *= up);
                }
                counts.push(&TokenOutcome {
                    selected: selections.neurons(start + token),
                    pre_activations,
                    coefficients: &coefficients,
                });
            }
        }
        Ok(counts.tally)
    };
    judged().map_err(model_error)
}

/// What a gated layer multiplies the activated gate by.
struct UpFactor {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl UpFactor {
    fn of(model: &LoadedModel, layer: &FfnLayer) -> candle::Result<Option<Self>> {
        if layer.gate.is_none() {
            return Ok(None);
        }
        let dense = model.dense_weights();
        let bias = layer.up_bias.as_ref();
        let bias = bias.map(|name| dense.get(layer.intermediate_size, name));
        let weight = dense.get((layer.intermediate_size, layer.hidden_size), &layer.up)?;
        Ok(Some(Self {
            weight,
            bias: bias.transpose()?,
        }))
    }

    /// Of inputs `(tokens, hidden)`, a row a token.
    fn apply(&self, x: &Tensor) -> candle::Result<Vec<Vec<f32>>> {
        let up = x.matmul(&self.weight.t()?)?;
        let up = match &self.bias {
            Some(bias) => up.broadcast_add(bias)?,
            None => up,
        };
        up.to_vec2()
    }
}
