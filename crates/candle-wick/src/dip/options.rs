//! How much the selectors with a density keep. Dip splits it between what goes into a layer's first matrices and what goes into its
//! down.
//!
//! Not here: which values are kept (`mask`).

use std::fmt;

use crate::error::{Error, Result};
use crate::selector_kind::SelectorKind;

/// Slope and offset of the published fit: the share of kept inputs, in logits, for a density in logits.
const FIT: [f64; 2] = [0.984_993_07, 0.299_764_78];

/// What `dip`, `dip-ca` and the selectors that they are compared with are told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DipOptions {
    /// Share of a layer's FFN weights that a token is multiplied with; above 0, at most 1.
    pub density: f64,
    /// What `dip-ca` multiplies the magnitude of a value with whose column would have to be read: from 0, which takes
    /// residents first, to 1, which is `dip`.
    pub gamma: f64,
    /// Keep everything of the tokens of a prompt, which are computed together and want nearly everything anyway.
    pub dense_prompt: bool,
}

impl Default for DipOptions {
    /// Half of the weights, and the published gamma.
    fn default() -> Self {
        Self {
            density: 0.5,
            gamma: 0.2,
            dense_prompt: false,
        }
    }
}

impl fmt::Display for DipOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prompt = if self.dense_prompt {
            ", dense prompt"
        } else {
            ""
        };
        write!(f, "density {}, gamma {}{prompt}", self.density, self.gamma)
    }
}

/// How many values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keep {
    /// Of a layer's inputs.
    pub(crate) channels: usize,
    /// Of its activations.
    pub(crate) neurons: usize,
}

impl DipOptions {
    /// Refuses a density or gamma out of bounds, for `selector`.
    pub(crate) fn check(&self, selector: SelectorKind) -> Result<()> {
        let refuse = |what: &str, value: f64, good: &str| {
            Err(Error::Selector {
                selector: selector.name(),
                reason: format!("{what} is {value:?}, it must be {good}"),
            })
        };
        if !(self.density > 0.0 && self.density <= 1.0) {
            return refuse("density", self.density, "more than 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.gamma) {
            return refuse("gamma", self.gamma, "from 0 to 1");
        }
        Ok(())
    }

    /// The shares kept of the inputs of `input_matrices` matrices (gate and up, or up alone), and of the activations that go
    /// into down: as published for gate and up, the second such that all matrices together have the density.
    fn split(&self, input_matrices: usize) -> [f64; 2] {
        if self.density == 1.0 {
            return [1.0, 1.0];
        }
        let logit = (self.density / (1.0 - self.density)).ln();
        let inputs = 1.0 / (1.0 + (-(FIT[0] * logit + FIT[1])).exp());
        let matrices = input_matrices as f64;
        let activations = (matrices + 1.0) * self.density - matrices * inputs;
        [inputs, activations.clamp(f64::MIN_POSITIVE, 1.0)]
    }

    /// How many of a layer's `channels` inputs and of its `neurons` activations are kept, at least one of each.
    pub(crate) fn keep(&self, input_matrices: usize, channels: usize, neurons: usize) -> Keep {
        let [inputs, activations] = self.split(input_matrices);
        let count = |share: f64, of: usize| ((share * of as f64) as usize).clamp(1, of);
        Keep {
            channels: count(inputs, channels),
            neurons: count(activations, neurons),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn density(density: f64) -> DipOptions {
        DipOptions {
            density,
            ..DipOptions::default()
        }
    }

    #[test]
    fn the_published_split_of_a_half() {
        let [inputs, activations] = density(0.5).split(2);
        assert!((inputs - 0.574).abs() < 5e-4, "{inputs}");
        assert!((activations - 0.351).abs() < 5e-4, "{activations}");
    }

    #[test]
    fn the_matrices_together_have_the_density() {
        for matrices in [1, 2] {
            for percent in 5..100 {
                let wanted = f64::from(percent) / 100.0;
                let [inputs, activations] = density(wanted).split(matrices);
                assert!(inputs > 0.0 && inputs < 1.0);
                let m = matrices as f64;
                let got = (m * inputs + activations) / (m + 1.0);
                assert!((got - wanted).abs() < 1e-9, "{wanted} {got}");
            }
        }
    }

    #[test]
    fn everything_at_one_and_something_near_zero() {
        let keep = |channels, neurons| Keep { channels, neurons };
        assert_eq!(density(1.0).keep(2, 576, 1536), keep(576, 1536));
        assert_eq!(density(1e-300).keep(2, 576, 1536), keep(1, 1));
        assert_eq!(density(0.5).keep(2, 576, 1536), keep(330, 539));
    }

    #[test]
    fn values_out_of_bounds_are_named() {
        for (options, named) in [
            (density(0.0), "density is 0"),
            (density(1.5), "density is 1.5"),
            (density(-1e-300), "density is -1e-300,"),
            (density(f64::NAN), "density is NaN"),
        ] {
            let error = options.check(SelectorKind::DipCa).unwrap_err().to_string();
            assert!(error.contains("dip-ca"), "{error}");
            assert!(error.contains(named), "{error}");
        }
        for gamma in [-0.1, 1.1, f64::NAN] {
            let options = DipOptions {
                gamma,
                ..DipOptions::default()
            };
            let error = options.check(SelectorKind::DipCa).unwrap_err().to_string();
            assert!(error.contains("gamma"), "{error}");
        }
        DipOptions::default().check(SelectorKind::Dip).unwrap();
    }
}
