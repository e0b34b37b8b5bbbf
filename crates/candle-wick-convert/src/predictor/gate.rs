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
use wick_format::{FfnLayer, PredictorPart, StoredDtype};
use wick_kernels::{pack_row, packed_groups, PackedBits, PackedRows};

use super::draft::{unmeasured, Draft};
use super::observed::{deciding, open, Observed, Wanted};
use super::place::place;
use super::threshold::LayerQuality;
use super::{check_recall, model_error, problem_with, FitOptions, FitProgress};
use crate::ConvertError;

/// Variance added to every input's, relative to the mean: weights of an input that never changes are kept as well.
const RIDGE: f64 = 1e-4;
/// Tokens whose variance is summed together.
const ROWS: usize = 1024;
/// The tensors of a layer.
const PARTS: [PredictorPart; 3] = PredictorPart::GATE;

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
    let wanted = Wanted {
        input: PredictorInput::FfnInput,
        // The rows as they are packed.
        layer_bytes: &|layer, _| 8 * (layer.intermediate_size * layer.hidden_size) as u64,
    };
    let texts = [text.to_owned()];
    let observed = Observed::on(open(model, None)?, &texts, options, &wanted, progress)?;
    let draft = draft(&path, &observed, bits)?;
    let layers = draft.measure_all(&observed, options, progress)?;
    Ok(GateReport {
        bytes: draft.finish(&path, &layers)?,
        path,
        bits: bits.count(),
        tokens: observed.parts.counts(),
        layers,
    })
}

/// All layers quantised, one after the other.
fn draft(path: &Path, observed: &Observed, bits: PackedBits) -> Result<Draft, ConvertError> {
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
        let (layer, part) = (index / PARTS.len(), index % PARTS.len());
        let mut made = made.borrow_mut();
        if part == 0 {
            *made = Some(quantised(observed, layer, bits)?);
        }
        let gate: &Gate = made.as_ref().expect("the first part comes first");
        Ok(gate.bytes(PARTS[part]))
    };
    let spec = |layer: &FfnLayer, part: PredictorPart| {
        let width = match part {
            PredictorPart::Gate => bits.row_bytes(layer.hidden_size),
            _ => packed_groups(layer.hidden_size),
        };
        part.spec(layer, StoredDtype::U8, width)
    };
    let specs = layers
        .iter()
        .flat_map(|layer| PARTS.map(|part| spec(layer, part)));
    let metadata = unmeasured(kind, observed.manifest());
    let model = observed.folder.path();
    Draft::write(model, path, metadata, specs.collect(), &content)
}

fn quantised(observed: &Observed, index: usize, bits: PackedBits) -> Result<Gate, ConvertError> {
    let layer = &observed.manifest().layers[index];
    let fit = observed.inputs(index, &observed.parts.fit)?;
    let made = || -> candle::Result<Option<Gate>> {
        let (weight, bias) = deciding(&observed.folder, layer)?;
        Gate::of(&weight, &bias, &fit, bits)
    };
    made().map_err(model_error)?.ok_or_else(|| {
        let problem = "has weights or inputs that are not finite, which no bits can stand for";
        let path = observed.folder.path();
        problem_with(path, format!("layer {} {problem}", layer.prefix))
    })
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
        let variance = variance(x, &mean)?.to_vec1::<f32>()?;
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

    fn bytes(&self, part: PredictorPart) -> Vec<u8> {
        match part {
            PredictorPart::Gate => self.weights.clone(),
            PredictorPart::GateScale => self.scales.clone(),
            _ => self
                .bias
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
        }
    }
}

/// The variance of each input, `(hidden)`, over the rows of `x` `(tokens, hidden)`, whose mean is `mean`.
fn variance(x: &Tensor, mean: &Tensor) -> candle::Result<Tensor> {
    let tokens = x.dim(0)?;
    let mut squares = mean.zeros_like()?;
    for start in (0..tokens).step_by(ROWS) {
        let rows = x.narrow(0, start, ROWS.min(tokens - start))?;
        squares = (squares + rows.broadcast_sub(mean)?.sqr()?.sum(0)?)?;
    }
    squares / tokens.max(1) as f64
}

#[cfg(test)]
mod tests {
    use candle::Device;

    use super::super::random::Random;
    use super::*;

    #[test]
    fn variances_are_those_of_all_rows_at_once() -> candle::Result<()> {
        // More rows than are summed together, and not a whole number of times.
        let x = (Random(3).normal(ROWS * 2 + 100, 5)? + 0.5)?;
        let mean = x.mean(0)?;
        let whole = x.broadcast_sub(&mean)?.sqr()?.mean(0)?;
        let error = (variance(&x, &mean)? - whole)?.abs()?.max(0)?;
        assert!(error.to_scalar::<f32>()? < 1e-4);
        Ok(())
    }

    /// Mean squared error of the scores on inputs with a mean, with and without what the bias does about it.
    #[test]
    fn more_bits_come_closer_and_the_mean_is_kept_by_all() -> candle::Result<()> {
        let (tokens, hidden, ffn) = (400, 80, 30);
        let mut random = Random(8);
        let x = (random.normal(tokens, hidden)? + 1.0)?;
        let weight = random.normal(ffn, hidden)?;
        let bias = random.normal(1, ffn)?.squeeze(0)?;
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
        let x = Random(2).normal(20, 8)?;
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
