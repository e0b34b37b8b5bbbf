//! What happened in a model that ran over a text: each FFN's inputs, whom the selector chose, and what the neurons would
//! have given.
//!
//! Inputs and selections are in temporary files. What neurons give comes from the layer's own matrices, one layer in memory at
//! a time.

use candle::Tensor;
use candle_wick::{Activation, FlashFolder, PredictorInput, RecordedTrace};
use candle_wick_models::{record_trace, LoadedModel};
use tempfile::TempDir;
use wick_format::FfnLayer;

use super::capture::Capture;
use super::observed::{deciding, tensors};
use super::threshold::Truth;
use super::{model_error, FitProgress};
use crate::ConvertError;

/// Tokens computed together.
const ROWS: usize = 256;

/// A token's neurons in one layer.
pub(super) struct TokenOutcome<'a> {
    /// Selected ids, ascending.
    pub(super) selected: &'a [u32],
    /// What the deciding matrix gives, one a neuron.
    pub(super) pre_activations: &'a [f32],
    /// By what each neuron's column is multiplied when it is computed.
    pub(super) coefficients: &'a [f32],
}

/// The files of a run.
pub(super) struct Record {
    capture: Capture,
    trace: RecordedTrace,
    tokens: usize,
    activation: Activation,
    /// The folder of the model, which itself is not needed any more.
    model: FlashFolder,
    _folder: TempDir,
}

impl Record {
    /// Runs `model` over `ids`, in sequences of its context.
    pub(super) fn of(
        model: &mut LoadedModel,
        ids: &[u32],
        progress: &dyn Fn(FitProgress),
    ) -> Result<Self, ConvertError> {
        let place = std::env::temp_dir();
        let folder = tempfile::tempdir_in(&place).map_err(ConvertError::io(&place, "write to"))?;
        let path = folder.path().join("selections");
        let on_tokens = |done| {
            progress(FitProgress {
                step: "tokens",
                done,
                total: ids.len(),
            });
        };
        let kinds = [PredictorInput::FfnInput];
        let captures = Capture::record(model, folder.path(), ids.len(), &kinds, |model| {
            record_trace(model, ids, &path, &on_tokens)?;
            Ok(())
        });
        Ok(Self {
            capture: captures?.swap_remove(0),
            tokens: ids.len(),
            activation: model.activation(),
            model: model.folder().clone(),
            trace: RecordedTrace::open(&path).map_err(candle_wick_models::Error::from)?,
            _folder: folder,
        })
    }

    /// Calls `each` with the tokens of layer `index` of the model that ran, in order.
    pub(super) fn for_each_token(
        &self,
        index: usize,
        each: &mut dyn FnMut(&TokenOutcome<'_>),
    ) -> Result<(), ConvertError> {
        let layer = &self.model.manifest().layers[index];
        let selections = self.trace.layer(index);
        let selections = selections.map_err(candle_wick_models::Error::from)?;
        let all = 0..self.tokens;
        let x = self.capture.inputs(index, &[all])?;
        let mut run = || -> candle::Result<()> {
            let (weight, bias) = deciding(&self.model, layer)?;
            let truth = Truth {
                weight: &weight,
                bias: &bias,
                activation: self.activation,
            };
            let up = UpFactor::of(&self.model, layer)?;
            for start in (0..selections.tokens()).step_by(ROWS) {
                let count = ROWS.min(selections.tokens() - start);
                let rows = x.narrow(0, start, count)?;
                let pre_activations = truth.pre_activations(&rows)?.to_vec2::<f32>()?;
                let coefficients = coefficients(&truth, &pre_activations, up.as_ref(), &rows)?;
                for token in 0..count {
                    each(&TokenOutcome {
                        selected: selections.neurons(start + token),
                        pre_activations: &pre_activations[token],
                        coefficients: &coefficients[token],
                    });
                }
            }
            Ok(())
        };
        run().map_err(model_error)
    }
}

/// `act(gate) * up`, or `act(up)`, a row a token.
fn coefficients(
    truth: &Truth<'_>,
    pre_activations: &[Vec<f32>],
    up: Option<&UpFactor>,
    x: &Tensor,
) -> candle::Result<Vec<Vec<f32>>> {
    let apply = |values: &Vec<f32>| -> Vec<f32> {
        let values = values.iter();
        values.map(|value| truth.activation.apply(*value)).collect()
    };
    let mut coefficients: Vec<Vec<f32>> = pre_activations.iter().map(apply).collect();
    if let Some(up) = up {
        for (coefficients, up) in coefficients.iter_mut().zip(up.apply(x)?) {
            let factors = coefficients.iter_mut().zip(up);
            factors.for_each(|(coefficient, up)| *coefficient *= up);
        }
    }
    Ok(coefficients)
}

/// What a gated layer multiplies the activated gate by.
struct UpFactor {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl UpFactor {
    fn of(model: &FlashFolder, layer: &FfnLayer) -> candle::Result<Option<Self>> {
        if layer.gate.is_none() {
            return Ok(None);
        }
        let dense = tensors(model);
        let bias = layer.up_bias.as_ref();
        let bias = bias.map(|name| dense.get(layer.intermediate_size, name));
        Ok(Some(Self {
            weight: dense.get((layer.intermediate_size, layer.hidden_size), &layer.up)?,
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

#[cfg(test)]
mod tests {
    use candle::Device;
    use candle_wick::Activation;

    use super::*;

    #[test]
    fn a_gated_neuron_is_multiplied_by_its_gate_and_its_up_row() -> candle::Result<()> {
        let weight = Tensor::new(&[[1f32, 0.0], [0.0, 1.0], [1.0, 1.0]], &Device::Cpu)?;
        let bias = Tensor::new(&[0f32, 0.5, -10.0], &Device::Cpu)?;
        let truth = Truth {
            weight: &weight,
            bias: &bias,
            activation: Activation::FatRelu(1.0),
        };
        let up = UpFactor {
            weight: Tensor::new(&[[3f32, 0.0], [0.0, -2.0], [1.0, 1.0]], &Device::Cpu)?,
            bias: Some(Tensor::new(&[1f32, 0.0, 0.0], &Device::Cpu)?),
        };
        let x = Tensor::new(&[[2f32, 4.0], [1.0, 0.0]], &Device::Cpu)?;
        let exact = truth.pre_activations(&x)?.to_vec2::<f32>()?;
        let gated = coefficients(&truth, &exact, Some(&up), &x)?;
        assert_eq!(gated, [[14.0, -36.0, 0.0], [0.0, 0.0, 0.0]]);
        let plain = coefficients(&truth, &exact, None, &x)?;
        assert_eq!(plain, [[2.0, 4.5, 0.0], [0.0, 0.0, 0.0]]);
        Ok(())
    }
}
