//! Low-rank predictors in 8 bits a weight: each row of both matrices is whole numbers and a scale.
//!
//! Whatever the predictors look at and whatever lies between their matrices stays. Thresholds are found anew, for the scores
//! as they are now.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use candle::Tensor;
use candle_nn::VarBuilder;
use candle_wick::{FlashFolder, PredictorForm, PredictorMetadata};
use wick_format::{FfnLayer, PredictorPart, StoredDtype};

use super::draft::{unmeasured, Draft};
use super::observed::{open, tensors, Observed, Wanted};
use super::place::place;
use super::threshold::LayerQuality;
use super::{check_recall, model_error, problem_with, FitOptions, FitProgress};
use crate::ConvertError;

/// The largest whole number of a row.
const LEVEL_MAX: f32 = 127.0;
/// The tensors of a layer.
const PARTS: [PredictorPart; 5] = PredictorPart::PAIR_I8;

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
    let source = open(model, predictors)?;
    let metadata = low_rank_metadata(&source)?;
    let pairs_bytes = source.predictor_bytes();
    let wanted = Wanted {
        input: metadata.input,
        // No layer's pair takes more than those of all.
        layer_bytes: &|_, _| pairs_bytes,
    };
    let draft = draft(&source, &path, metadata)?;
    let texts = [text.to_owned()];
    let observed = Observed::on(open(model, None)?, &texts, options, &wanted, progress)?;
    let layers = draft.measure_all(&observed, options, progress)?;
    let dram_bytes = [source.predictor_bytes(), draft.dram_bytes()];
    let [_, tuned, measured] = observed.parts.counts();
    Ok(QuantizeReport {
        bytes: draft.finish(&path, &layers)?,
        path,
        dram_bytes,
        tokens: [tuned, measured],
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
    let tensors = tensors(source);
    let before = metadata.made_by.as_deref().unwrap_or("an earlier version");
    let kind = PredictorMetadata {
        made_by: Some(format!("{before}, quantised to 8 bits")),
        ..metadata
    };
    let mut ranks = Vec::with_capacity(manifest.layers.len());
    let mut specs = Vec::new();
    for (index, layer) in manifest.layers.iter().enumerate() {
        let rank = source.predictor_rank(index);
        let rank = rank
            .map_err(candle_wick_models::Error::from)?
            .unwrap_or_default();
        ranks.push(rank);
        specs.extend(PARTS.map(|part| part.spec(layer, StoredDtype::I8, rank)));
    }
    let made = RefCell::new(None);
    let content = |index: usize| {
        let (layer, part) = (index / PARTS.len(), index % PARTS.len());
        let mut made = made.borrow_mut();
        if part == 0 {
            let pair = Pair::of(
                source.path(),
                &tensors,
                &manifest.layers[layer],
                ranks[layer],
            );
            *made = Some(pair?);
        }
        let pair: &Pair = made.as_ref().expect("the first part comes first");
        Ok(pair.bytes(PARTS[part]))
    };
    let metadata = unmeasured(kind, manifest);
    Draft::write(source.path(), path, metadata, specs, &content)
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
    fn of(
        source: &Path,
        tensors: &VarBuilder<'_>,
        layer: &FfnLayer,
        rank: usize,
    ) -> Result<Self, ConvertError> {
        let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
        let load = || -> candle::Result<_> {
            let name = |part| layer.predictor_tensor(part);
            let down = tensors.get((rank, hidden), &name(PredictorPart::Down))?;
            let down = Rows::of(&down)?;
            let up = Rows::of(&tensors.get((ffn, rank), &name(PredictorPart::Up))?)?;
            let bias = tensors.get(ffn, &name(PredictorPart::UpBias))?;
            Ok((down, up, bias.to_vec1::<f32>()?))
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

    fn bytes(&self, part: PredictorPart) -> Vec<u8> {
        let values = |values: &[f32]| {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        };
        match part {
            PredictorPart::Down => self.down.levels.clone(),
            PredictorPart::Up => self.up.levels.clone(),
            PredictorPart::DownScale => values(&self.down.scales),
            PredictorPart::UpScale => values(&self.up.scales),
            _ => values(&self.bias),
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
