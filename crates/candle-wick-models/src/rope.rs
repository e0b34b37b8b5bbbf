//! Rotary position embeddings: the tables, with the frequency scalings that checkpoints ask for.
//!
//! Angles are `position * inv_freq`, in f32 as transformers computes them (`modeling_rope_utils`).

use candle::{Device, Result, Tensor};
use serde::Deserialize;

/// `rope_scaling` or `rope_parameters` of a config; keys as there.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct RopeParameters {
    /// `default`, `linear` or `llama3`.
    #[serde(alias = "type")]
    pub rope_type: Option<String>,
    /// Base of the frequencies, in the newer configs.
    pub rope_theta: Option<f64>,
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
