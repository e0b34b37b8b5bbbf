//! Weights from one dtype into another, rounded to nearest even.
//!
//! A value that is finite and would become infinite is an error: such a model would write nonsense.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use wick_format::Dtype;

/// Elements converted at a time.
const LANES: usize = 256;

/// From a stored dtype to a wanted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cast {
    pub(crate) from: Dtype,
    pub(crate) to: Dtype,
}

impl Cast {
    /// Converts `source` into `target`, which have the same number of elements.
    ///
    /// The error is the first value that does not fit.
    pub(crate) fn apply(self, source: &[u8], target: &mut [u8]) -> Result<(), f32> {
        let (from_bytes, to_bytes) = (self.from.size_bytes(), self.to.size_bytes());
        assert_eq!(
            source.len() / from_bytes,
            target.len() / to_bytes,
            "element counts differ"
        );
        if self.from == self.to {
            target.copy_from_slice(source);
            return Ok(());
        }
        let mut values = [0f32; LANES];
        let pieces = source
            .chunks(LANES * from_bytes)
            .zip(target.chunks_mut(LANES * to_bytes));
        for (source, target) in pieces {
            let values = &mut values[..source.len() / from_bytes];
            widen(self.from, source, values);
            narrow(self.to, values, target)?;
        }
        Ok(())
    }
}

/// The largest magnitude that fits, for messages.
pub(crate) fn largest(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => f32::MAX,
        Dtype::F16 => f16::MAX.to_f32(),
        Dtype::Bf16 => bf16::MAX.to_f32(),
    }
}

/// Little-endian elements as f32, exactly.
fn widen(from: Dtype, source: &[u8], values: &mut [f32]) {
    match from {
        Dtype::F32 => {
            for (value, bytes) in values.iter_mut().zip(source.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Dtype::F16 => {
            let mut halves = [f16::ZERO; LANES];
            let halves = &mut halves[..values.len()];
            for (half, bytes) in halves.iter_mut().zip(source.as_chunks::<2>().0) {
                *half = f16::from_le_bytes(*bytes);
            }
            halves.convert_to_f32_slice(values);
        }
        Dtype::Bf16 => {
            for (value, bytes) in values.iter_mut().zip(source.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
    }
}

/// As many values as `target` holds, rounded; the error is the first one that does not fit.
pub(crate) fn narrow(to: Dtype, values: &[f32], target: &mut [u8]) -> Result<(), f32> {
    let fits = |value: f32, rounded_infinite: bool| {
        if rounded_infinite && value.is_finite() {
            Err(value)
        } else {
            Ok(())
        }
    };
    match to {
        Dtype::F32 => {
            for (bytes, value) in target.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *bytes = value.to_le_bytes();
            }
        }
        Dtype::F16 => {
            let pieces = values.chunks(LANES).zip(target.chunks_mut(2 * LANES));
            for (values, target) in pieces {
                let mut halves = [f16::ZERO; LANES];
                let halves = &mut halves[..values.len()];
                halves.convert_from_f32_slice(values);
                let targets = target.as_chunks_mut::<2>().0.iter_mut();
                for ((bytes, half), &value) in targets.zip(&*halves).zip(values) {
                    fits(value, half.is_infinite())?;
                    *bytes = half.to_le_bytes();
                }
            }
        }
        Dtype::Bf16 => {
            for (bytes, &value) in target.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                let rounded = bf16::from_f32(value);
                fits(value, rounded.is_infinite())?;
                *bytes = rounded.to_le_bytes();
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
        let one = |&value: &f32| match dtype {
            Dtype::F32 => value.to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        };
        values.iter().flat_map(one).collect()
    }

    #[test]
    fn every_pair_equals_rounding_one_by_one() {
        // Halfway cases of both narrow types, signs, subnormals, and more than one piece.
        let mut values = vec![0.0, -0.0, 1.0, -2.5, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0];
        values.extend([
            1.0 + 1.0 / 256.0,
            1.0 + 3.0 / 256.0,
            6e-8,
            1e-5,
            -3e-6,
            65504.0,
        ]);
        values.extend((0..600).map(|i| (i as f32 - 300.0) * 0.37));
        for from in ALL {
            let source = encode(from, &values);
            let mut stored = vec![0f32; values.len()];
            for (values, bytes) in stored
                .chunks_mut(LANES)
                .zip(source.chunks(LANES * from.size_bytes()))
            {
                widen(from, bytes, values);
            }
            for to in ALL {
                if (from, to) == (Dtype::Bf16, Dtype::F16) {
                    stored
                        .iter_mut()
                        .for_each(|v| *v = v.clamp(-65504.0, 65504.0));
                }
                let source = encode(from, &stored);
                let mut target = vec![0u8; stored.len() * to.size_bytes()];
                let outcome = Cast { from, to }.apply(&source, &mut target);
                if (from, to) == (Dtype::Bf16, Dtype::F16) {
                    assert_eq!(outcome, Err(65536.0)); // 65504 as bf16
                    continue;
                }
                outcome.unwrap();
                assert_eq!(target, encode(to, &stored), "{from} to {to}");
            }
        }
    }

    #[test]
    fn values_out_of_range_are_named() {
        let source = encode(Dtype::F32, &[1.0, 70000.0]);
        let cast = Cast {
            from: Dtype::F32,
            to: Dtype::F16,
        };
        assert_eq!(cast.apply(&source, &mut [0; 4]), Err(70000.0));
        let source = encode(Dtype::F32, &[f32::INFINITY, f32::NEG_INFINITY]);
        assert_eq!(cast.apply(&source, &mut [0; 4]), Ok(()));
        let source = encode(Dtype::F32, &[f32::MAX]);
        let cast = Cast {
            from: Dtype::F32,
            to: Dtype::Bf16,
        };
        assert_eq!(cast.apply(&source, &mut [0; 2]), Err(f32::MAX));
    }

    #[test]
    fn nan_stays_nan() {
        let source = encode(Dtype::F32, &[f32::NAN]);
        let mut target = [0; 2];
        Cast {
            from: Dtype::F32,
            to: Dtype::F16,
        }
        .apply(&source, &mut target)
        .unwrap();
        assert!(f16::from_le_bytes(target).is_nan());
    }
}
