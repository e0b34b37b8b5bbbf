//! Rotary position embeddings: the tables, with the frequency scalings that checkpoints ask for.
//!
//! Angles are `position * inv_freq`, in f32 as transformers computes them (`modeling_rope_utils`).

use candle::{Device, Result, Tensor};
use serde::Deserialize;

use crate::limits::check_positive;

/// `rope_scaling` or `rope_parameters` of a config; keys as there.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct RopeParameters {
    /// `default`, `linear` or `llama3`.
    #[serde(alias = "type")]
    pub rope_type: Option<String>,
    /// Base of the frequencies, in the newer configs.
    pub rope_theta: Option<f64>,
    /// Share of each head that is turned, in the newer configs.
    pub partial_rotary_factor: Option<f64>,
    /// How much longer the context became.
    pub factor: Option<f64>,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are scaled in full.
    pub low_freq_factor: Option<f64>,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone.
    pub high_freq_factor: Option<f64>,
    /// The context before it was made longer.
    pub original_max_position_embeddings: Option<f64>,
}

impl RopeParameters {
    /// Frequencies for the first `factor` of a head of `head_dim` values, rounded down; `theta` and `factor` are
    /// those of the config, which these parameters may know better. The error is a reason without the config's name.
    pub(crate) fn partial_inv_freq(
        &self,
        theta: f64,
        factor: f64,
        head_dim: usize,
    ) -> std::result::Result<Vec<f32>, String> {
        let theta = self.rope_theta.unwrap_or(theta);
        check_positive("rope_theta", theta)?;
        let factor = self.partial_rotary_factor.unwrap_or(factor);
        check_positive("partial_rotary_factor", factor)?;
        // A product beyond usize becomes the largest.
        let dim = (factor * head_dim as f64) as usize;
        if dim == 0 || dim > head_dim || !dim.is_multiple_of(2) {
            return Err(format!(
                "partial_rotary_factor {factor} turns {dim} of a head's {head_dim} values, expected an even number \
                 of them"
            ));
        }
        self.inv_freq(theta, dim)
    }

    /// Frequencies of the `dim / 2` pairs; the error is a reason without the config's name.
    pub(crate) fn inv_freq(&self, theta: f64, dim: usize) -> std::result::Result<Vec<f32>, String> {
        let plain: Vec<f32> = (0..dim / 2)
            .map(|i| 1.0 / (theta as f32).powf(2.0 * i as f32 / dim as f32))
            .collect();
        let need = |value: Option<f64>, key: &str| match value {
            Some(value) if value.is_finite() && value > 0.0 => Ok(value as f32),
            Some(value) => Err(format!("rope {key} is {value}")),
            None => Err(format!("rope scaling lacks \"{key}\"")),
        };
        match self.rope_type.as_deref().unwrap_or("default") {
            "default" => Ok(plain),
            "linear" => {
                let factor = need(self.factor, "factor")?;
                Ok(plain
                    .into_iter()
                    .map(|frequency| frequency / factor)
                    .collect())
            }
            "llama3" => {
                let factor = need(self.factor, "factor")?;
                let low = need(self.low_freq_factor, "low_freq_factor")?;
                let high = need(self.high_freq_factor, "high_freq_factor")?;
                let original = need(
                    self.original_max_position_embeddings,
                    "original_max_position_embeddings",
                )?;
                let scaled = |frequency: f32| {
                    let wavelength = 2.0 * std::f32::consts::PI / frequency;
                    if wavelength < original / high {
                        frequency
                    } else if wavelength > original / low {
                        frequency / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                };
                Ok(plain.into_iter().map(scaled).collect())
            }
            other => Err(format!(
                "rope type \"{other}\" is not supported (default, linear, llama3 are)"
            )),
        }
    }
}

/// Cosines and sines of all positions of a context, `(ctx, dim / 2)` each.
#[derive(Clone, Debug)]
pub struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    pub(crate) fn new(inv_freq: &[f32], ctx: usize) -> Result<Self> {
        let angles: Vec<f32> = (0..ctx)
            .flat_map(|position| {
                inv_freq
                    .iter()
                    .map(move |frequency| position as f32 * frequency)
            })
            .collect();
        let angles = Tensor::from_vec(angles, (ctx, inv_freq.len()), &Device::Cpu)?;
        Ok(Self {
            cos: angles.cos()?,
            sin: angles.sin()?,
        })
    }

    /// Turns `x` `(1, heads, seq, dim)`, whose first row is at `position`. Frequencies for fewer than `dim`
    /// values turn the first ones and leave the others (`partial_rotary_factor`).
    pub(crate) fn apply(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        let (seq, dim) = (x.dim(2)?, x.dim(3)?);
        let rotary_dim = 2 * self.cos.dim(1)?;
        if rotary_dim < dim {
            let turned = self.apply(&x.narrow(3, 0, rotary_dim)?, position)?;
            let rest = x.narrow(3, rotary_dim, dim - rotary_dim)?;
            return Tensor::cat(&[turned, rest], 3);
        }
        let (cos, sin) = (
            self.cos.narrow(0, position, seq)?,
            self.sin.narrow(0, position, seq)?,
        );
        candle_nn::rotary_emb::rope(&x.contiguous()?, &cos, &sin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_head_is_turned() {
        let plain = RopeParameters::default();
        // Phi 2: 32 of 80, as the product is rounded down.
        let pairs = plain.partial_inv_freq(10_000.0, 0.4, 80).unwrap();
        assert_eq!(pairs, plain.inv_freq(10_000.0, 32).unwrap());
        let inside = RopeParameters {
            rope_theta: Some(500.0),
            partial_rotary_factor: Some(0.75),
            ..RopeParameters::default()
        };
        let pairs = inside.partial_inv_freq(10_000.0, 0.4, 16).unwrap();
        assert_eq!(pairs, plain.inv_freq(500.0, 12).unwrap());

        let rope = Rope::new(&pairs, 4).unwrap();
        let x = Tensor::randn(0f32, 1.0, (1, 2, 3, 16), &Device::Cpu).unwrap();
        let turned = rope.apply(&x, 1).unwrap();
        let part = |x: &Tensor, start| {
            let part = x.narrow(3, start, 16 - start).unwrap();
            part.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(part(&turned, 12), part(&x, 12));
        assert_ne!(part(&turned, 0), part(&x, 0));
    }

    #[test]
    fn a_part_that_cannot_be_turned_is_refused() {
        let plain = RopeParameters::default();
        for (factor, head_dim) in [
            (0.5, 6),
            (0.01, 64),
            (1.5, 64),
            (1e300, 64),
            (0.0, 64),
            (-0.5, 64),
            (f64::NAN, 64),
        ] {
            let reason = plain
                .partial_inv_freq(10_000.0, factor, head_dim)
                .unwrap_err();
            assert!(reason.contains("partial_rotary_factor"), "{reason}");
        }
        let reason = plain.partial_inv_freq(0.0, 0.5, 64).unwrap_err();
        assert!(reason.contains("rope_theta"), "{reason}");
    }
}
