//! Scaled rotary frequencies.
//!
//! Linear scaling stands in the metadata. That of Llama 3 is only there as a tensor with a divisor for each
//! frequency; the published models share two of its three constants, so the third is found and the others are
//! proved by computing the divisors again.

use std::f64::consts::TAU;

use serde_json::{json, Value};
use wick_format::Dtype;

use super::config::Model;
use super::metadata::Described;
use crate::ConvertError;

/// Divisors of the frequencies, one for each pair.
pub(super) const DIVISORS: &str = "rope_freqs.weight";

/// What llama.cpp's converter assumes for Llama 3.
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;
const ORIGINAL_POSITIONS: usize = 8192;

/// Divisors come as f32.
const TOLERANCE: f64 = 1e-4;

/// The value of `rope_scaling`, if frequencies are scaled.
pub(super) fn scaling(
    metadata: &Described<'_>,
    model: &Model,
    theta: f64,
) -> Result<Option<Value>, ConvertError> {
    let linear = linear(metadata)?;
    match (linear, divisors(metadata, model)?) {
        (linear, None) => {
            Ok(linear.map(|factor| json!({ "rope_type": "linear", "factor": factor })))
        }
        (None, Some(divisors)) => llama3(metadata, &divisors, theta).map(Some),
        (Some(_), Some(_)) => {
            let expected = format!("one of it and tensor `{DIVISORS}`");
            Err(metadata.wrong("rope.scaling.factor", "there", expected))
        }
    }
}

fn linear(metadata: &Described<'_>) -> Result<Option<f64>, ConvertError> {
    let kind = metadata.find::<&str>("rope.scaling.type")?;
    let factor = match metadata.number("rope.scaling.factor")? {
        // As files of 2023 call it.
        None => metadata.number("rope.scale_linear")?,
        factor => factor,
    };
    match (kind, factor) {
        (Some("none"), _) | (None | Some("linear"), None) => Ok(None),
        (None | Some("linear"), factor) => Ok(factor.filter(|&factor| factor != 1.0)),
        (Some(other), _) => Err(metadata.wrong("rope.scaling.type", other, "none or linear")),
    }
}

/// The divisors, unless all of them are 1.
fn divisors(metadata: &Described<'_>, model: &Model) -> Result<Option<Vec<f64>>, ConvertError> {
    let source = metadata.source;
    let Some(tensor) = source.get(DIVISORS) else {
        return Ok(None);
    };
    let pairs = model.head_dim / 2;
    if tensor.shape != [pairs] {
        let got = format!("of shape {:?}", tensor.shape);
        return Err(source.wrong(tensor, got, format!("[{pairs}], half a head")));
    }
    let mut bytes = vec![0; 4 * pairs]; // as many as the tensor has elements
    source.read(tensor, 0..pairs, 0..1, Dtype::F32, &mut bytes)?;
    let values = bytes.as_chunks::<4>().0;
    let values = values
        .iter()
        .map(|value| f64::from(f32::from_le_bytes(*value)));
    let values: Vec<f64> = values.collect();
    Ok(values.iter().any(|&value| value != 1.0).then_some(values))
}

fn llama3(metadata: &Described<'_>, divisors: &[f64], theta: f64) -> Result<Value, ConvertError> {
    let factor = divisors.iter().copied().fold(0.0, f64::max);
    let expected = |pair: usize| {
        let frequency = theta.powf(-(pair as f64) / divisors.len() as f64);
        llama3_divisor(frequency, factor)
    };
    let same = divisors.iter().enumerate().all(|(pair, &divisor)| {
        let expected = expected(pair);
        (divisor - expected).abs() <= TOLERANCE * expected
    });
    if same {
        return Ok(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LOW_FREQ_FACTOR,
            "high_freq_factor": HIGH_FREQ_FACTOR,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        }));
    }
    let source = metadata.source;
    let got = format!("a table of rotary frequencies of its own, up to {factor}");
    match source.get(DIVISORS) {
        Some(tensor) => Err(source.wrong(tensor, got, "that of Llama 3")),
        None => unreachable!("the divisors were read from it"),
    }
}

/// What a frequency (radians per position) is divided by.
fn llama3_divisor(frequency: f64, factor: f64) -> f64 {
    let turns = ORIGINAL_POSITIONS as f64 * frequency / TAU;
    if turns > HIGH_FREQ_FACTOR {
        1.0
    } else if turns < LOW_FREQ_FACTOR {
        factor
    } else {
        let smooth = (turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR);
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}
