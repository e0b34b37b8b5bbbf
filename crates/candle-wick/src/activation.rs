//! The activation functions of feed-forward layers, under their names in Hugging Face configs.
//!
//! In a gated layer the activation applies to the gate (`act(gate) * up`), otherwise to `up` itself.
//!
//! Not here: which neurons are computed (`selector`).

use std::str::FromStr;

use crate::error::{Error, Result};

/// One activation function, as `hidden_act` or `activation_function` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `relu`: `max(x, 0)`.
    Relu,
    /// `relu2`: `max(x, 0)^2` (Persimmon).
    Relu2,
    /// `silu` (also `swish`): `x * sigmoid(x)`.
    Silu,
    /// `gelu`: `x * Phi(x)` with the exact error function.
    Gelu,
    /// `gelu_new` (also `gelu_pytorch_tanh`): the tanh approximation of `gelu`.
    GeluNew,
}

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
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::Gelu => {
                0.5 * x * (1.0 + candle::cpu::erf::erf_f32(x * std::f32::consts::FRAC_1_SQRT_2))
            }
            Self::GeluNew => {
                let slope = (2.0 / std::f32::consts::PI).sqrt();
                0.5 * x * (1.0 + (slope * x * (1.0 + 0.044715 * x * x)).tanh())
            }
        }
    }

    /// Whether the function is exactly zero on a half line, so that skipping inactive neurons is exact.
    pub fn is_relu_like(self) -> bool {
        matches!(self, Self::Relu | Self::Relu2)
    }

    /// Whether a neuron with this pre-activation contributes anything; always true outside the ReLU family.
    pub fn is_active(self, pre_activation: f32) -> bool {
        // Written as "not inactive" so that a NaN counts as active and stays visible.
        !(self.is_relu_like() && pre_activation <= 0.0)
    }

    /// The name in Hugging Face configs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::Relu2 => "relu2",
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluNew => "gelu_new",
        }
    }
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

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "relu" => Ok(Self::Relu),
            "relu2" => Ok(Self::Relu2),
            "silu" | "swish" => Ok(Self::Silu),
            "gelu" => Ok(Self::Gelu),
            "gelu_new" | "gelu_pytorch_tanh" => Ok(Self::GeluNew),
            _ => Err(Error::UnknownName {
                what: "activation",
                name: name.to_owned(),
                known: "relu, relu2, silu, gelu, gelu_new",
            }),
        }
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
            (Activation::GeluNew, 1.399_571_5, -0.169_429_87),
        ];
        for (activation, at_positive, at_negative) in cases {
            let (a, b) = (activation.apply(1.5), activation.apply(-0.7));
            assert!((a - at_positive).abs() < 1e-6, "{activation:?} {a}");
            assert!((b - at_negative).abs() < 1e-6, "{activation:?} {b}");
        }
    }

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for name in ["relu", "relu2", "silu", "gelu", "gelu_new"] {
            assert_eq!(name.parse::<Activation>().unwrap().name(), name);
        }
        let message = "mish".parse::<Activation>().unwrap_err().to_string();
        assert!(
            message.contains("mish") && message.contains("silu"),
            "{message}"
        );
    }

    #[test]
    fn inactive_means_exactly_zero() {
        for x in [-3.0, -0.0, 0.0, f32::MIN_POSITIVE, 2.0] {
            for activation in [Activation::Relu, Activation::Relu2] {
                if !activation.is_active(x) {
                    assert_eq!(activation.apply(x), 0.0);
                }
            }
            assert!(Activation::Silu.is_active(x));
        }
        assert!(Activation::Relu.apply(f32::NAN).is_nan() && Activation::Relu.is_active(f32::NAN));
    }
}
