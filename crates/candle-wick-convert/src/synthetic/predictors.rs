//! Random predictors, as large and as busy as the paper's.
//!
//! Both factors are scaled so that a score has about the distribution N(0, 1); the threshold lets a tenth through.
//! The metadata says of that what is known without a measurement: 0.10 selected, by the threshold; a recall of 0.10,
//! that of a choice that knows nothing of the model; 0.24 selected by any of 5 tokens, which is the paper's figure for
//! trained predictors, so that slots are shared out as they would be for those.

use std::path::Path;

use candle_wick::{Between, PredictorForm, PredictorInput, PredictorMetadata, PREDICTORS_FILE};
use wick_format::{Dtype, Manifest};

use super::weights::deviation;
use super::Geometry;
use crate::predictor::file;
use crate::source::Random;
use crate::ConvertError;

/// A standard normal variable exceeds it for a tenth.
const THRESHOLD: f32 = 1.2816;
const SELECTED_FRACTION: f32 = 0.10;
const UNION_FRACTION: f32 = 0.24;

/// Bytes of the tensors, without header and checksums.
pub(super) fn tensor_bytes(geometry: &Geometry, layers: usize, hidden: usize, ffn: usize) -> u64 {
    let of_layer = |layer| {
        let matrices = geometry.rank(layer) * (hidden + ffn) * Dtype::F16.size_bytes();
        (matrices + ffn * Dtype::F32.size_bytes()) as u64
    };
    (0..layers).map(of_layer).sum()
}

/// Writes the file into the folder of `manifest`; gives its size. `on_written` is told the bytes of each tensor.
pub(super) fn write(
    folder: &Path,
    manifest: &Manifest,
    geometry: &Geometry,
    seed: u64,
    on_written: &dyn Fn(u64),
) -> Result<u64, ConvertError> {
    let everywhere = |value| vec![value; manifest.layers.len()];
    let metadata = PredictorMetadata {
        model_hash: manifest.neurons_hash().to_owned(),
        form: PredictorForm::LowRank,
        input: PredictorInput::FfnInput,
        between: Between::None,
        made_by: Some("random".to_owned()),
        thresholds: everywhere(THRESHOLD),
        recall: everywhere(SELECTED_FRACTION),
        selected_fraction: everywhere(SELECTED_FRACTION),
        union_fraction: everywhere(UNION_FRACTION),
        windows: None,
    };
    let ranks: Vec<usize> = (0..manifest.layers.len())
        .map(|n| geometry.rank(n))
        .collect();
    let specs = file::pair_specs(manifest, &ranks);
    let content = |index: usize| {
        let spec = &specs[index];
        let (random, dtype) = match spec.shape[..] {
            [_, columns] => {
                let deviation = deviation(columns);
                (Random::uniform(seed, &spec.name, deviation), Dtype::F16)
            }
            _ => (Random::constant(0.0), Dtype::F32),
        };
        let elements: usize = spec.shape.iter().product();
        let mut bytes = vec![0; elements * dtype.size_bytes()];
        let fits = random.read(0..elements, dtype, &mut bytes);
        fits.expect("values below 2 fit into every dtype");
        on_written(bytes.len() as u64);
        Ok(bytes)
    };
    let path = folder.join(PREDICTORS_FILE);
    file::write(&path, &metadata, &specs, &content)
}
