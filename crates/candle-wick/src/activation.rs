//! The activation functions of feed-forward layers, under their names in Hugging Face configs.
//!
//! In a gated layer the activation applies to the gate (`act(gate) * up`), otherwise to `up` itself.
//!
//! Not here: which neurons are computed (`selector`).

use std::str::FromStr;

use crate::error::{Error, Result};

/// One activation function, as `hidden_act` or `activation_function` names it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `relu`: `max(x, 0)`.
    Relu,
    /// `relu2`: `max(x, 0)^2` (Persimmon).
    Relu2,
    /// `relu6`: `min(max(x, 0), 6)`.
    Relu6,
    /// `fatrelu`: `x` above a threshold, else 0 (ProSparse); its config key is `hidden_act_param`.
    FatRelu(f32),
    /// `leaky_relu`: `x`, a hundredth of it below 0.
    LeakyRelu,
    /// `silu` (also `swish`): `x * sigmoid(x)`.
    Silu,
    /// `gelu` (also `gelu_python`): `x * Phi(x)` with the exact error function.
    Gelu,
    /// `gelu_10`: `gelu`, at most 10.
    Gelu10,
    /// `gelu_new` (also `gelu_pytorch_tanh`, `gelu_python_tanh`, `gelu_fast`, `gelu_accurate`): the tanh
    /// approximation of `gelu`.
    GeluNew,
    /// `quick_gelu`: `x * sigmoid(1.702 x)`.
    QuickGelu,
    /// `mish`: `x * tanh(ln(1 + e^x))`.
    Mish,
    /// `laplace`: the distribution function of a normal variable that has about the shape of `relu2` (MEGA).
    Laplace,
    /// `sigmoid`.
    Sigmoid,
    /// `tanh`.
    Tanh,
    /// `linear`: `x` itself.
    Linear,
}

/// Every activation under the names that configs use; the first name of each is its own.
const NAMES: [(&str, Activation); 21] = [
    ("relu", Activation::Relu),
    ("relu2", Activation::Relu2),
    ("relu6", Activation::Relu6),
    ("fatrelu", Activation::FatRelu(0.0)),
    ("leaky_relu", Activation::LeakyRelu),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("gelu_10", Activation::Gelu10),
    ("gelu_new", Activation::GeluNew),
    ("gelu_pytorch_tanh", Activation::GeluNew),
    ("gelu_python_tanh", Activation::GeluNew),
    ("gelu_fast", Activation::GeluNew),
    ("gelu_accurate", Activation::GeluNew),
    ("quick_gelu", Activation::QuickGelu),
    ("mish", Activation::Mish),
    ("laplace", Activation::Laplace),
    ("sigmoid", Activation::Sigmoid),
    ("tanh", Activation::Tanh),
    ("linear", Activation::Linear),
];

/// `laplace` is `relu2` in value and slope at its mean; transformers has six digits of it.
const LAPLACE_MEAN: f32 = std::f32::consts::FRAC_1_SQRT_2;
const LAPLACE_DEVIATION: f32 = 0.282_095;

impl Activation {
    /// The function's value at `x`.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            // Not `max`, which would turn a NaN into 0.
            Self::Relu => positive(x),
            Self::Relu2 => {
                let positive = positive(x);
                positive * positive
            }
            Self::Relu6 if x >= 6.0 => 6.0,
            Self::Relu6 => positive(x),
            Self::FatRelu(threshold) if x <= threshold => 0.0,
            Self::FatRelu(_) | Self::Linear => x,
            Self::LeakyRelu if x < 0.0 => 0.01 * x,
            Self::LeakyRelu => x,
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::Gelu => x * normal(x),
            // Not `min`, which would turn a NaN into 10.
            Self::Gelu10 if x >= 10.0 => 10.0,
            Self::Gelu10 => x * normal(x),
            Self::GeluNew => {
                let slope = (2.0 / std::f32::consts::PI).sqrt();
                0.5 * x * (1.0 + (slope * x * (1.0 + 0.044715 * x * x)).tanh())
            }
            Self::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
            // Above 20 the logarithm is x to f32's precision, where e^x could overflow.
            Self::Mish if x > 20.0 => x,
            Self::Mish => x * x.exp().ln_1p().tanh(),
            Self::Laplace => normal((x - LAPLACE_MEAN) / LAPLACE_DEVIATION),
            Self::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Self::Tanh => x.tanh(),
        }
    }

    /// Whether the function is exactly zero on a half line, so that skipping inactive neurons is exact.
    pub fn is_relu_like(self) -> bool {
        matches!(
            self,
            Self::Relu | Self::Relu2 | Self::Relu6 | Self::FatRelu(_)
        )
    }

    /// Whether a neuron with this pre-activation contributes anything; always true outside the ReLU family.
    pub fn is_active(self, pre_activation: f32) -> bool {
        // Written as "not inactive" so that a NaN counts as active and stays visible.
        let threshold = match self {
            Self::FatRelu(threshold) => threshold,
            _ => 0.0,
        };
        !(self.is_relu_like() && pre_activation <= threshold)
    }

    /// The activation of a config: its name, and `hidden_act_param` for those that have a parameter.
    ///
    /// # Errors
    /// The name is unknown, or the parameter is missing or no number that a threshold can be.
    pub fn from_config(name: &str, parameter: Option<f32>) -> Result<Self> {
        match (name.parse()?, parameter) {
            (Self::FatRelu(_), Some(threshold)) if threshold.is_finite() && threshold >= 0.0 => {
                Ok(Self::FatRelu(threshold))
            }
            (Self::FatRelu(_), parameter) => Err(Error::ActivationParameter {
                activation: "fatrelu",
                parameter,
            }),
            (activation, _) => Ok(activation),
        }
    }

    /// Every function, those with several names more than once.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(|(_, activation)| activation)
    }

    /// The name in Hugging Face configs.
    pub fn name(self) -> &'static str {
        let is_same_function =
            |other: &Self| std::mem::discriminant(other) == std::mem::discriminant(&self);
        let mut named = NAMES.iter().filter(|(_, other)| is_same_function(other));
        named.next().map_or("", |(name, _)| name)
    }
}

/// Distribution function of the standard normal variable.
fn normal(x: f32) -> f32 {
    0.5 * (1.0 + candle::cpu::erf::erf_f32(x * std::f32::consts::FRAC_1_SQRT_2))
}

fn positive(x: f32) -> f32 {
    if x <= 0.0 {
        0.0
    } else {
        x
    }
}

impl FromStr for Activation {
    type Err = Error;

    /// By name alone: the threshold of `fatrelu` is 0 then, see [`Self::from_config`].
    fn from_str(name: &str) -> Result<Self> {
        let known = NAMES.iter().find(|(known, _)| *known == name);
        known
            .map(|(_, activation)| *activation)
            .ok_or_else(|| Error::UnknownName {
                what: "activation",
                name: name.to_owned(),
                known: "relu, relu2, relu6, fatrelu, leaky_relu, silu, gelu, gelu_10, gelu_new, quick_gelu, mish, \
                        laplace, sigmoid, tanh, linear",
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_match_the_formulas() {
        // At 1.5 and -0.7, computed in double precision.
        let cases = [
            (Activation::Relu, 1.5, 0.0),
            (Activation::Relu2, 2.25, 0.0),
            (Activation::Silu, 1.226_361_7, -0.232_268_56),
            (Activation::Gelu, 1.399_789_2, -0.169_374_56),
            (Activation::Gelu10, 1.399_789_2, -0.169_374_56),
            (Activation::GeluNew, 1.399_571_5, -0.169_429_87),
            (Activation::Relu6, 1.5, 0.0),
            (Activation::FatRelu(0.5), 1.5, 0.0),
            (Activation::FatRelu(1.5), 0.0, 0.0),
            (Activation::LeakyRelu, 1.5, -0.007),
            (Activation::QuickGelu, 1.391_662_2, -0.163_106_05),
            (Activation::Mish, 1.403_378_3, -0.267_870_23),
            (Activation::Laplace, 0.997529, 0.0),
            (Activation::Sigmoid, 0.817_574_5, 0.331_812_23),
            (Activation::Tanh, 0.905_148_27, -0.604_367_8),
            (Activation::Linear, 1.5, -0.7),
        ];
        for (activation, at_positive, at_negative) in cases {
            let (a, b) = (activation.apply(1.5), activation.apply(-0.7));
            assert!((a - at_positive).abs() < 1e-6, "{activation:?} {a}");
            assert!((b - at_negative).abs() < 1e-6, "{activation:?} {b}");
        }
    }

    #[test]
    fn gelu_10_is_cut_and_laplace_rises_by_half_at_its_mean() {
        for (x, y) in [(9.5, 9.5), (10.0, 10.0), (1e30, 10.0), (-1e30, 0.0)] {
            assert_eq!(Activation::Gelu10.apply(x), y);
        }
        assert_eq!(Activation::Laplace.apply(LAPLACE_MEAN), 0.5);
        assert!((Activation::Laplace.apply(0.5) - 0.2314211).abs() < 1e-6);
        for activation in [Activation::Gelu10, Activation::Laplace] {
            assert!(activation.apply(f32::NAN).is_nan());
        }
    }

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for (name, activation) in NAMES {
            assert_eq!(name.parse::<Activation>().unwrap(), activation);
            assert_eq!(activation.name().parse::<Activation>().unwrap(), activation);
        }
        assert_eq!(Activation::FatRelu(0.3).name(), "fatrelu");
        let message = "geglu".parse::<Activation>().unwrap_err().to_string();
        assert!(
            message.contains("geglu") && message.contains("silu"),
            "{message}"
        );
    }

    #[test]
    fn inactive_means_exactly_zero() {
        for x in [-3.0, -0.0, 0.0, f32::MIN_POSITIVE, 2.0] {
            let relu_like = NAMES.iter().map(|(_, activation)| *activation);
            for activation in relu_like.chain([Activation::FatRelu(1.0)]) {
                if !activation.is_active(x) {
                    assert_eq!(activation.apply(x), 0.0);
                } else if activation.is_relu_like() {
                    assert!(activation.apply(x) != 0.0 || x * x == 0.0);
                }
            }
            assert!(Activation::Silu.is_active(x));
        }
        assert!(Activation::Relu.apply(f32::NAN).is_nan() && Activation::Relu.is_active(f32::NAN));
    }

    #[test]
    fn fatrelu_needs_its_threshold() {
        let fatrelu = Activation::from_config("fatrelu", Some(0.01)).unwrap();
        assert_eq!(fatrelu, Activation::FatRelu(0.01));
        assert!(!fatrelu.is_active(0.01) && fatrelu.is_active(0.011));
        for parameter in [None, Some(f32::NAN), Some(f32::INFINITY), Some(-0.5)] {
            let message = Activation::from_config("fatrelu", parameter).unwrap_err();
            assert!(
                message.to_string().contains("hidden_act_param"),
                "{message}"
            );
        }
        let silu = Activation::from_config("silu", Some(0.01)).unwrap();
        assert_eq!(silu, Activation::Silu);
    }
}
