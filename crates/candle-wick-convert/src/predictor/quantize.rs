//! Low-rank predictors in 8 bits a weight: each row of both matrices is whole numbers and a scale.
//!
//! Whatever the predictors look at and whatever lies between their matrices stays. Thresholds are found anew, for the scores
//! as they are now.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use candle::Tensor;
use candle_nn::VarBuilder;
use candle_wick::{
    FlashFolder, FlashVarBuilder, IoOptions, Placement, PredictorForm, PredictorInput,
    PredictorMetadata, SelectorKind,
};
use wick_format::{FfnLayer, StoredDtype, TensorSpec};

use super::capture::Capture;
use super::draft::{unmeasured, Draft, LayerInputs};
use super::place::place;
use super::threshold::{LayerQuality, Truth};
use super::{check_recall, deciding, model_error, problem_with, FitOptions, FitProgress};
use super::{Observed, Parts};
use crate::ConvertError;

/// The largest whole number of a row.
const LEVEL_MAX: f32 = 127.0;

/// What was made.
#[derive(Clone, Debug, serde::Serialize)]
pub struct QuantizeReport {
    /// The file written.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Size in DRAM of the predictors as they were, and as they are.
    pub dram_bytes: [u64; 2],
    /// Tokens used for the thresholds, and for the measures.
    pub tokens: [usize; 2],
    /// The measures, a layer each.
    pub layers: Vec<LayerQuality>,
}

/// Writes the low-rank predictors of the converted model, or those in the file `predictors`, into its folder in 8 bits a
/// weight, with thresholds for `text`; of `options`, the rank plays no part.
pub fn quantize(
    model: &Path,
    predictors: Option<&Path>,
    text: &Path,
    options: &FitOptions,
    progress: &dyn Fn(FitProgress),
) -> Result<QuantizeReport, ConvertError> {
    check_recall(model, options)?;
    let path = place(model, options.out.as_deref())?;
    let source = FlashFolder::open_with(model, IoOptions::default(), predictors);
    let source = source.map_err(candle_wick_models::Error::from)?;
    let metadata = low_rank_metadata(&source)?;
    let input = metadata.input;
    let draft = draft(&source, &path, metadata)?;
    let mut observed = Observed::on(model, &[text.to_owned()], options, progress)?;
    let seen = match input {
        PredictorInput::FfnInput => None,
        other => {
            let ids = &observed.ids;
            let seen = Capture::record(&mut observed.model, model, ids, other, &|_| {})?;
            Some(seen)
        }
    };
    let parts = Parts::of(observed.ids.len());
    let layers = observed.for_each_layer(options, progress, |index, layer, x| {
        let (weight, bias) = deciding(&observed.model, layer).map_err(model_error)?;
        let truth = Truth {
            weight: &weight,
            bias: &bias,
            activation: observed.model.activation(),
        };
        let [_, tune, measure] = parts.split(x).map_err(model_error)?;
        let (seen_tune, seen_measure) = match &seen {
            None => (tune.clone(), measure.clone()),
            Some(seen) => {
                let seen = seen.inputs(index, layer.hidden_size)?;
                let [_, tune, measure] = parts.split(&seen).map_err(model_error)?;
                (tune, measure)
            }
        };
        let [tune, measure] = [(tune, seen_tune), (measure, seen_measure)]
            .map(|(ffn, seen)| LayerInputs { ffn, seen });
        draft.measure(index, &truth, [&tune, &measure], options.recall)
    })?;
    let dram_bytes = [source.predictor_bytes(), draft.dram_bytes()];
    Ok(QuantizeReport {
        bytes: draft.finish(&path, &layers)?,
        path,
        dram_bytes,
        tokens: [parts.tune, parts.measure],
        layers,
    })
}

/// What the predictors say of themselves, where they can be quantised.
fn low_rank_metadata(source: &FlashFolder) -> Result<PredictorMetadata, ConvertError> {
    let found = source
        .predictors()
        .map_err(candle_wick_models::Error::from)?;
    let bits = source
        .predictor_bits(0)
        .map_err(candle_wick_models::Error::from)?;
    let (Some(found), Some(path)) = (found, source.predictors_path()) else {
        let problem = "has no predictors to quantise".to_owned();
        return Err(problem_with(source.path(), problem));
    };
    let problem = match (found.form, bits) {
        (PredictorForm::LowRank, Some(8)) => "is in 8 bits already".to_owned(),
        (PredictorForm::LowRank, _) => return Ok(found.clone()),
        (form, _) => {
            format!("has predictors of form {form}; those of form lowrank can be quantised")
        }
    };
    Err(problem_with(path, problem))
}

/// All layers quantised, one after the other.
fn draft(
    source: &FlashFolder,
    path: &Path,
    metadata: PredictorMetadata,
) -> Result<Draft, ConvertError> {
    let manifest = source.manifest();
    let placement = Placement::resident(source, SelectorKind::Dense);
    let tensors = FlashVarBuilder::new(source, placement).dense();
    let before = metadata.made_by.as_deref().unwrap_or("an earlier version");
    let kind = PredictorMetadata {
        made_by: Some(format!("{before}, quantised to 8 bits")),
        ..metadata
    };
    let mut specs = Vec::new();
    for layer in &manifest.layers {
        let down = tensors.get_unchecked(&layer.predictor_tensor("down.weight"));
        let rank = down.and_then(|down| down.dim(0)).map_err(model_error)?;
        specs.extend(PairPart::ALL.map(|part| part.spec(layer, rank)));
    }
    let made = RefCell::new(None);
    let content = |index: usize| {
        let (layer, part) = (index / PairPart::ALL.len(), index % PairPart::ALL.len());
        let mut made = made.borrow_mut();
        if part == 0 {
            *made = Some(Pair::of(source.path(), &tensors, &manifest.layers[layer])?);
        }
        let pair: &Pair = made.as_ref().expect("the first part comes first");
        Ok(pair.bytes(PairPart::ALL[part]))
    };
    let metadata = unmeasured(kind, manifest);
    Draft::write(source.path(), path, metadata, specs, &content)
}

/// A tensor of a layer's quantised pair.
#[derive(Clone, Copy)]
enum PairPart {
    /// `(rank, hidden)`.
    Down,
    /// `(intermediate, rank)`.
    Up,
    /// `(rank)`.
    DownScale,
    /// `(intermediate)`.
    UpScale,
    /// `(intermediate)`.
    Bias,
}

impl PairPart {
    /// In the order of the file.
    const ALL: [Self; 5] = [
        Self::Down,
        Self::Up,
        Self::DownScale,
        Self::UpScale,
        Self::Bias,
    ];

    fn spec(self, layer: &FfnLayer, rank: usize) -> TensorSpec {
        let ffn = layer.intermediate_size;
        let (name, dtype, shape) = match self {
            Self::Down => (
                "down.weight",
                StoredDtype::I8,
                &[rank, layer.hidden_size][..],
            ),
            Self::Up => ("up.weight", StoredDtype::I8, &[ffn, rank][..]),
            Self::DownScale => ("down.scale", StoredDtype::F32, &[rank][..]),
            Self::UpScale => ("up.scale", StoredDtype::F32, &[ffn][..]),
            Self::Bias => ("up.bias", StoredDtype::F32, &[ffn][..]),
        };
        TensorSpec::new(layer.predictor_tensor(name), dtype, shape)
    }
}

/// The quantised pair of one layer.
struct Pair {
    down: Rows,
    up: Rows,
    bias: Vec<f32>,
}

/// Whole numbers, and what each row's are multiplied by.
struct Rows {
    levels: Vec<u8>,
    scales: Vec<f32>,
}

impl Pair {
    fn of(source: &Path, tensors: &VarBuilder<'_>, layer: &FfnLayer) -> Result<Self, ConvertError> {
        let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
        let load = || -> candle::Result<_> {
            let name = |part: &str| layer.predictor_tensor(part);
            let rank = tensors.get_unchecked(&name("down.weight"))?.dim(0)?;
            let down = Rows::of(&tensors.get((rank, hidden), &name("down.weight"))?)?;
            let up = Rows::of(&tensors.get((ffn, rank), &name("up.weight"))?)?;
            let bias = tensors.get(ffn, &name("up.bias"))?.to_vec1::<f32>()?;
            Ok((down, up, bias))
        };
        match load().map_err(model_error)? {
            (Some(down), Some(up), bias) => Ok(Self { down, up, bias }),
            _ => {
                let problem = "has predictors with weights that are not finite";
                Err(problem_with(
                    source,
                    format!("layer {} {problem}", layer.prefix),
                ))
            }
        }
    }

    fn bytes(&self, part: PairPart) -> Vec<u8> {
        let values = |values: &[f32]| {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        };
        match part {
            PairPart::Down => self.down.levels.clone(),
            PairPart::Up => self.up.levels.clone(),
            PairPart::DownScale => values(&self.down.scales),
            PairPart::UpScale => values(&self.up.scales),
            PairPart::Bias => values(&self.bias),
        }
    }
}

impl Rows {
    /// `None` where some weights are not finite.
    fn of(matrix: &Tensor) -> candle::Result<Option<Self>> {
        let width = matrix.dim(1)?;
        let weights = matrix.flatten_all()?.to_vec1::<f32>()?;
        let (mut levels, mut scales) = (Vec::with_capacity(weights.len()), Vec::new());
        for row in weights.chunks(width.max(1)) {
            let largest = row.iter().fold(0f32, |most, weight| most.max(weight.abs()));
            if row.iter().any(|weight| !weight.is_finite()) {
                return Ok(None);
            }
            // A row of zeros, whatever its scale.
            let scale = if largest > 0.0 {
                largest / LEVEL_MAX
            } else {
                1.0
            };
            let level = |weight: &f32| (weight / scale).round().clamp(-LEVEL_MAX, LEVEL_MAX) as i8;
            levels.extend(row.iter().map(|weight| level(weight) as u8));
            scales.push(scale);
        }
        Ok(Some(Self { levels, scales }))
    }
}

#[cfg(test)]
mod tests {
    use candle::Device;

    use super::*;

    #[test]
    fn rows_keep_their_weights_to_half_a_level() -> candle::Result<()> {
        let mut weights: Vec<f32> = (0..60).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        weights[40..60].fill(0.0);
        let rows = Tensor::from_slice(&weights, (3, 20), &Device::Cpu)?;
        let rows = Rows::of(&rows)?.unwrap();
        for (i, weight) in weights.iter().enumerate() {
            let scale = rows.scales[i / 20];
            let value = f32::from(rows.levels[i] as i8) * scale;
            assert!(
                (value - weight).abs() <= 0.51 * scale,
                "{i}: {value}, {weight}"
            );
            assert!(*weight != 0.0 || value == 0.0);
        }
        weights[7] = f32::NAN;
        let rows = Tensor::from_slice(&weights, (3, 20), &Device::Cpu)?;
        assert!(Rows::of(&rows)?.is_none());
        Ok(())
    }
}
