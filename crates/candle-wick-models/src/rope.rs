//! Rotary position embeddings: the tables, with the frequency scalings that checkpoints ask for.
//!
//! Angles are `position * inv_freq`, in f32 as transformers computes them (`modeling_rope_utils`).

use candle::{Device, Result, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::limits::check_positive;

/// `rope_scaling` or `rope_parameters` of a config; keys as there.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct RopeParameters {
    /// `default`, `linear`, `dynamic` or `llama3`.
    pub rope_type: Option<String>,
    /// The older name of `rope_type`; some configs have both.
    #[serde(rename = "type")]
    pub older_type: Option<String>,
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
    /// Every other key.
    #[serde(flatten)]
    pub(crate) others: Map<String, Value>,
}

impl RopeParameters {
    /// The parameters of a config. One saved for both old and new readers has both keys; transformers then obeys
    /// `rope_scaling`.
    pub(crate) fn of(rope_scaling: &Option<Self>, rope_parameters: &Option<Self>) -> Self {
        let chosen = rope_scaling.as_ref().or(rope_parameters.as_ref());
        chosen.cloned().unwrap_or_default()
    }

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
    ///
    /// `dynamic` scales them only for texts beyond `max_position_embeddings`, and no context here is longer:
    /// it is `default`.
    fn inv_freq(&self, theta: f64, dim: usize) -> std::result::Result<Vec<f32>, String> {
        self.check_not_by_layer()?;
        let plain = (0..dim / 2).map(|i| 1.0 / (theta as f32).powf(2.0 * i as f32 / dim as f32));
        let frequencies: Vec<f32> = match self.kind()? {
            "default" => plain.collect(),
            "linear" => {
                let factor = needed(self.factor, "factor")?;
                plain.map(|frequency| frequency / factor).collect()
            }
            "dynamic" => {
                needed(self.factor, "factor")?;
                plain.collect()
            }
            "llama3" => {
                let scaled = self.llama3()?;
                plain.map(scaled).collect()
            }
            other => {
                return Err(format!(
                    "rope type \"{other}\" is not supported (default, linear, dynamic, llama3 are)"
                ))
            }
        };
        match frequencies.iter().find(|frequency| !frequency.is_finite()) {
            Some(frequency) => Err(format!(
                "rope_theta {theta} and the scaling beside it give a frequency of {frequency}"
            )),
            None => Ok(frequencies),
        }
    }

    /// Of two names that differ some releases of transformers obey the one and some the other.
    fn kind(&self) -> std::result::Result<&str, String> {
        match (self.rope_type.as_deref(), self.older_type.as_deref()) {
            (Some(kind), Some(other)) if kind != other => Err(format!(
                "rope scaling has rope_type \"{kind}\" and type \"{other}\", expected one of the two"
            )),
            (kind, older) => Ok(kind.or(older).unwrap_or("default")),
        }
    }

    /// The newest configs may have parameters for each type of layer, under the type's name.
    fn check_not_by_layer(&self) -> std::result::Result<(), String> {
        match self.others.iter().find(|(_, value)| value.is_object()) {
            Some((layer_type, _)) => Err(format!(
                "rope parameters of their own for layers of type \"{layer_type}\" are not supported"
            )),
            None => Ok(()),
        }
    }

    /// Long wavelengths are scaled in full, short ones not at all, those between in part.
    fn llama3(&self) -> std::result::Result<impl Fn(f32) -> f32, String> {
        let factor = needed(self.factor, "factor")?;
        let low = needed(self.low_freq_factor, "low_freq_factor")?;
        let high = needed(self.high_freq_factor, "high_freq_factor")?;
        let original = needed(
            self.original_max_position_embeddings,
            "original_max_position_embeddings",
        )?;
        Ok(move |frequency: f32| {
            let wavelength = 2.0 * std::f32::consts::PI / frequency;
            if wavelength < original / high {
                frequency
            } else if wavelength > original / low {
                frequency / factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        })
    }
}

fn needed(value: Option<f64>, key: &str) -> std::result::Result<f32, String> {
    match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value as f32),
        Some(value) => Err(format!("rope {key} is {value}, expected more than 0")),
        None => Err(format!("rope scaling lacks \"{key}\"")),
    }
}

/// Cosines and sines of all positions of a context, `(ctx, dim / 2)` each.
#[derive(Clone)]
pub(crate) struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// Bytes of one position, in the tables that all layers share.
    pub(crate) fn position_bytes(inv_freq: &[f32]) -> u64 {
        2 * size_of_val(inv_freq) as u64
    }

    /// The tables for positions below `ctx`.
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
    use serde_json::json;

    use super::*;

    fn inv_freq(json: Value) -> std::result::Result<Vec<f32>, String> {
        let parameters: RopeParameters = serde_json::from_value(json).unwrap();
        parameters.inv_freq(10_000.0, 4)
    }

    #[test]
    fn the_type_has_two_names() {
        let plain = inv_freq(json!({})).unwrap();
        assert_eq!(plain, [1.0, 0.01]);
        for json in [
            json!({"type": "linear", "factor": 4}),
            json!({"rope_type": "linear", "factor": 4.0}),
            json!({"rope_type": "linear", "type": "linear", "factor": 4.0}),
        ] {
            assert_eq!(inv_freq(json).unwrap(), [0.25, 0.0025]);
        }
        let dynamic = json!({"type": "dynamic", "factor": 2.0});
        assert_eq!(inv_freq(dynamic).unwrap(), plain);
    }

    #[test]
    fn what_cannot_be_scaled_so_is_said() {
        for (json, part) in [
            (json!({"rope_type": "yarn", "factor": 4.0}), "\"yarn\""),
            (json!({"type": "su"}), "\"su\""),
            (json!({"type": "linear"}), "\"factor\""),
            (
                json!({"type": "linear", "rope_type": "default", "factor": 2}),
                "one of the two",
            ),
            (json!({"type": "dynamic", "factor": 0}), "factor is 0"),
            (
                json!({"type": "linear", "factor": 1e-300}),
                "frequency of inf",
            ),
            (
                json!({"sliding_attention": {"rope_theta": 1e4}}),
                "\"sliding_attention\"",
            ),
        ] {
            let reason = inv_freq(json).unwrap_err();
            assert!(reason.contains(part), "{reason}");
        }
        let reason = RopeParameters::default().inv_freq(1e-300, 4).unwrap_err();
        assert!(reason.contains("rope_theta"), "{reason}");
    }

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
