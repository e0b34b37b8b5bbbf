//! The test's own word on scores, in f64, by what FORMAT.md says of the tensors.

use candle_wick::FlashFolder;
use half::f16;
use wick_format::{StoredDtype, TensorSpec};

use super::file::PredictorTensors;

/// The values of a tensor.
fn decoded((spec, bytes): &(TensorSpec, Vec<u8>)) -> Vec<f64> {
    let words = bytes.chunks(spec.dtype.size_bytes());
    let value = |word: &[u8]| match spec.dtype {
        StoredDtype::F32 => f64::from(f32::from_le_bytes(word.try_into().unwrap())),
        StoredDtype::F16 => f16::from_le_bytes(word.try_into().unwrap()).to_f64(),
        _ => f64::from(word[0] as i8),
    };
    words.map(value).collect()
}

impl PredictorTensors {
    pub fn scores(&self, folder: &FlashFolder, index: usize, x: &[f32]) -> Vec<f64> {
        let layer = &folder.manifest().layers[index];
        let part = |part: &str| {
            let name = format!("{}.predictor.{part}", layer.prefix);
            let mut all = self.tensors.iter();
            all.find(|(spec, _)| spec.name == name)
        };
        let x: Vec<f64> = x.iter().map(|value| f64::from(*value)).collect();
        match part("gate.weight") {
            Some((spec, packed)) => {
                let scales = decoded(part("gate.scale").unwrap());
                gate_scores((&spec.shape, packed), &scales, &x)
            }
            None => {
                let scaled = |name: &str, x: &[f64]| {
                    let weights = decoded(part(&format!("{name}.weight")).unwrap());
                    let scales = part(&format!("{name}.scale")).map(decoded);
                    let rows = weights.chunks(x.len()).enumerate();
                    let row = |(r, row): (usize, &[f64])| {
                        let sum: f64 = row.iter().zip(x).map(|(weight, x)| weight * x).sum();
                        sum * scales.as_ref().map_or(1.0, |scales| scales[r])
                    };
                    rows.map(row).collect::<Vec<f64>>()
                };
                let mut query = scaled("down", &x);
                if self.metadata["between"] == "relu" {
                    query.iter_mut().for_each(|value| *value = value.max(0.0));
                }
                scaled("up", &query)
            }
        }
    }
}

fn gate_scores((shape, packed): (&[usize], &[u8]), scales: &[f64], x: &[f64]) -> Vec<f64> {
    let (rows, groups) = (shape[0], x.len().div_ceil(64));
    let bits = shape[1] / (8 * groups);
    let score = |row: usize| {
        let mut sum = 0.0;
        for (i, x) in x.iter().enumerate() {
            let (group, within) = (i / 64, i % 64);
            let byte = packed[row * shape[1] + group * 8 * bits + within % (8 * bits)];
            let code = byte >> (within / (8 * bits) * bits) & ((1 << bits) - 1);
            let level = f64::from(code) - f64::from((1u32 << bits) - 1) / 2.0;
            sum += level * scales[row * groups + group] * x;
        }
        sum
    };
    (0..rows).map(score).collect()
}
