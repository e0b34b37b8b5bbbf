//! The quantised gate: the matrix that decides which neurons are active, once more, in 1, 2 or 4 bits a weight. Nobody trains
//! it.
//!
//! Each row is packed so that its error on inputs that vary as the text's do is small, and what packing adds to the mean
//! score, over those inputs, goes into the bias: `bias + (W - Q) mean(x)`.
//!
//! Not here: the packing itself (`wick_kernels`), thresholds (`draft`).

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use candle::Tensor;
use candle_wick::{Between, PredictorForm, PredictorInput, PredictorMetadata};
use rayon::prelude::*;
use wick_format::{FfnLayer, StoredDtype, TensorSpec};
use wick_kernels::{pack_row, packed_groups, PackedBits, PackedRows};

use super::draft::{unmeasured, Draft, LayerInputs};
use super::place::place;
use super::threshold::{LayerQuality, Truth};
use super::{check_recall, deciding, model_error, problem_with, FitOptions, FitProgress};
use super::{Observed, Parts};
use crate::ConvertError;

/// Variance added to every input's, relative to the mean: weights of an input that never changes are kept as well.
const RIDGE: f64 = 1e-4;

/// What was made.
#[derive(Clone, Debug, serde::Serialize)]
pub struct GateReport {
    /// The file written.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Bits of a weight.
    pub bits: usize,
    /// Tokens used for means and variances, for the thresholds, and for the measures.
    pub tokens: [usize; 3],
    /// The measures, a layer each.
    pub layers: Vec<LayerQuality>,
}

/// Makes a quantised gate for each layer of the converted model and writes them into its folder, with thresholds for `text`;
/// of `options`, the rank plays no part.
pub fn gate(
    model: &Path,
    text: &Path,
    bits: PackedBits,
    options: &FitOptions,
    progress: &dyn Fn(FitProgress),
) -> Result<GateReport, ConvertError> {
    check_recall(model, options)?;
    let path = place(model, options.out.as_deref())?;
    let observed = Observed::on(model, &[text.to_owned()], options, progress)?;
    let parts = Parts::of(observed.ids.len());
    let draft = draft(model, &path, &observed, bits, &parts)?;
    let layers = observed.for_each_layer(options, progress, |index, layer, x| {
        let (weight, bias) = deciding(&observed.model, layer).map_err(model_error)?;
        let truth = Truth {
            weight: &weight,
            bias: &bias,
            activation: observed.model.activation(),
        };
        let [_, tune, measure] = parts.split(x).map_err(model_error)?;
        let [tune, measure] = [tune, measure].map(|ffn| LayerInputs {
            seen: ffn.clone(),
            ffn,
        });
        draft.measure(index, &truth, [&tune, &measure], options.recall)
    })?;
    Ok(GateReport {
        bytes: draft.finish(&path, &layers)?,
        path,
        bits: bits.count(),
        tokens: [parts.fit, parts.tune, parts.measure],
        layers,
    })
}

/// All layers quantised, one after the other.
fn draft(
    model: &Path,
    path: &Path,
    observed: &Observed,
    bits: PackedBits,
    parts: &Parts,
) -> Result<Draft, ConvertError> {
    let layers = &observed.manifest().layers;
    let kind = PredictorMetadata {
        form: PredictorForm::Gate,
        input: PredictorInput::FfnInput,
        between: Between::None,
        made_by: Some(format!("quantised to {} bits", bits.count())),
        ..PredictorMetadata::default()
    };
    let made = RefCell::new(None);
    let content = |index: usize| {
        let (layer, part) = (index / GatePart::ALL.len(), index % GatePart::ALL.len());
        let part = GatePart::ALL[part];
        let mut made = made.borrow_mut();
        if part == GatePart::Weight {
            let inputs = observed.capture.inputs(layer, layers[layer].hidden_size)?;
            *made = Some(quantised(observed, &layers[layer], &inputs, bits, parts)?);
        }
        let gate: &Gate = made.as_ref().expect("the weight comes first");
        Ok(gate.bytes(part))
    };
    let specs = layers
        .iter()
        .flat_map(|layer| GatePart::ALL.map(|part| part.spec(layer, bits)));
    let metadata = unmeasured(kind, observed.manifest());
    Draft::write(model, path, metadata, specs.collect(), &content)
}

fn quantised(
    observed: &Observed,
    layer: &FfnLayer,
    inputs: &Tensor,
    bits: PackedBits,
    parts: &Parts,
) -> Result<Gate, ConvertError> {
    let made = || -> candle::Result<Option<Gate>> {
        let (weight, bias) = deciding(&observed.model, layer)?;
        let [fit, _, _] = parts.split(inputs)?;
        Gate::of(&weight, &bias, &fit, bits)
    };
    made().map_err(model_error)?.ok_or_else(|| {
        let problem = "has weights or inputs that are not finite, which no bits can stand for";
        let path = observed.model.folder().path();
        problem_with(path, format!("layer {} {problem}", layer.prefix))
    })
}

/// A tensor of a layer's quantised gate.
#[derive(Clone, Copy, PartialEq)]
enum GatePart {
    /// `(intermediate, bytes of a row)`.
    Weight,
    /// `(intermediate, groups)`.
    Scale,
    /// `(intermediate)`.
    Bias,
}

impl GatePart {
    /// In the order of the file.
    const ALL: [Self; 3] = [Self::Weight, Self::Scale, Self::Bias];

    fn spec(self, layer: &FfnLayer, bits: PackedBits) -> TensorSpec {
        let (ffn, hidden) = (layer.intermediate_size, layer.hidden_size);
        let (name, dtype, shape) = match self {
            Self::Weight => {
                let shape = vec![ffn, bits.row_bytes(hidden)];
                ("gate.weight", StoredDtype::U8, shape)
            }
            Self::Scale => {
                let shape = vec![ffn, packed_groups(hidden)];
                ("gate.scale", StoredDtype::F16, shape)
            }
            Self::Bias => ("gate.bias", StoredDtype::F32, vec![ffn]),
        };
        TensorSpec::new(layer.predictor_tensor(name), dtype, &shape)
    }
}

/// The quantised gate of one layer.
struct Gate {
    weights: Vec<u8>,
    scales: Vec<u8>,
    bias: Vec<f32>,
}

impl Gate {
    /// Of `weight` `(intermediate, hidden)` and `bias` for inputs like `x` `(tokens, hidden)`; `None` where some of them are not
    /// finite.
    fn of(
        weight: &Tensor,
        bias: &Tensor,
        x: &Tensor,
        bits: PackedBits,
    ) -> candle::Result<Option<Self>> {
        let (ffn, hidden) = weight.dims2()?;
        let mean = x.mean(0)?;
        let variance = x.broadcast_sub(&mean)?.sqr()?.mean(0)?.to_vec1::<f32>()?;
        let ridge = RIDGE * variance.iter().map(|value| f64::from(*value)).sum::<f64>();
        let ridge = (ridge / hidden as f64) as f32 + f32::MIN_POSITIVE;
        let importance: Vec<f32> = variance.iter().map(|value| value + ridge).collect();
        let exact = weight
            .matmul(&mean.unsqueeze(1)?)?
            .squeeze(1)?
            .to_vec1::<f32>()?;
        let (rows, mean) = (
            weight.flatten_all()?.to_vec1::<f32>()?,
            mean.to_vec1::<f32>()?,
        );
        let (row_bytes, scale_bytes) = (bits.row_bytes(hidden), 2 * packed_groups(hidden));
        let mut weights = vec![0; ffn * row_bytes];
        let mut scales = vec![0; ffn * scale_bytes];
        let packed = weights
            .par_chunks_mut(row_bytes)
            .zip(scales.par_chunks_mut(scale_bytes));
        let packed = packed.zip(rows.par_chunks(hidden));
        packed.for_each(|((weights, scales), row)| {
            pack_row(bits, row, &importance, weights, scales);
        });
        let mut of_mean = vec![0.0; ffn];
        let quantised = PackedRows {
            bits,
            weights: &weights,
            scales: &scales,
        };
        quantised.dot(&mean, 1, &mut of_mean);
        let mut bias = bias.to_vec1::<f32>()?;
        for ((bias, exact), of_mean) in bias.iter_mut().zip(exact).zip(of_mean) {
            *bias += exact - of_mean;
        }
        // A weight or a mean that is not finite makes the product so.
        let is_finite = bias
            .iter()
            .chain(&importance)
            .all(|value| value.is_finite());
        Ok(is_finite.then_some(Self {
            weights,
            scales,
            bias,
        }))
    }

    fn bytes(&self, part: GatePart) -> Vec<u8> {
        match part {
            GatePart::Weight => self.weights.clone(),
            GatePart::Scale => self.scales.clone(),
            GatePart::Bias => self
                .bias
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle::Device;

    use super::*;

    /// Mean squared error of the scores on inputs with a mean, with and without what the bias does about it.
    #[test]
    fn more_bits_come_closer_and_the_mean_is_kept_by_all() -> candle::Result<()> {
        let (tokens, hidden, ffn) = (400, 80, 30);
        let x = Tensor::randn(1.0f32, 1.0, (tokens, hidden), &Device::Cpu)?;
        let weight = Tensor::randn(0f32, 1.0, (ffn, hidden), &Device::Cpu)?;
        let bias = Tensor::randn(0f32, 1.0, ffn, &Device::Cpu)?;
        let exact = x.matmul(&weight.t()?)?.broadcast_add(&bias)?;
        let values = x.flatten_all()?.to_vec1::<f32>()?;
        let mut errors = Vec::new();
        for bits in PackedBits::ALL {
            let gate = Gate::of(&weight, &bias, &x, bits)?.unwrap();
            let rows = PackedRows {
                bits,
                weights: &gate.weights,
                scales: &gate.scales,
            };
            let mut scores = vec![0.0; ffn * tokens];
            rows.dot(&values, tokens, &mut scores);
            let scores = Tensor::from_vec(scores, (ffn, tokens), &Device::Cpu)?.t()?;
            let bias = Tensor::from_slice(&gate.bias, ffn, &Device::Cpu)?;
            let error = (scores.broadcast_add(&bias)? - &exact)?;
            let drift = error.mean(0)?.abs()?.max(0)?.to_scalar::<f32>()?;
            assert!(drift < 1e-3, "{bits:?}: {drift}");
            errors.push(error.sqr()?.mean_all()?.to_scalar::<f32>()?);
        }
        // Of a normal row, one bit leaves 36 % of the variance, two leave 12 %, four about 1 %.
        let shares: Vec<f32> = errors.iter().map(|error| error / hidden as f32).collect();
        assert!((0.25..0.45).contains(&shares[0]), "{shares:?}");
        assert!((0.07..0.16).contains(&shares[1]), "{shares:?}");
        assert!((0.003..0.02).contains(&shares[2]), "{shares:?}");
        Ok(())
    }

    #[test]
    fn weights_that_are_not_finite_are_refused() -> candle::Result<()> {
        let x = Tensor::randn(0f32, 1.0, (20, 8), &Device::Cpu)?;
        let bias = Tensor::zeros(3, candle::DType::F32, &Device::Cpu)?;
        for odd in [f32::NAN, f32::INFINITY] {
            let mut weight = vec![1f32; 24];
            weight[5] = odd;
            let weight = Tensor::from_vec(weight, (3, 8), &Device::Cpu)?;
            assert!(Gate::of(&weight, &bias, &x, PackedBits::Two)?.is_none());
        }
        Ok(())
    }
}
