//! What kind of predictor a file holds: its form, what it looks at, and what lies between its matrices.
//!
//! Each kind goes by one name, in the file's metadata and wherever people read of it.
//!
//! Not here: what else the file says of itself (`predictors`), the scores themselves (`predictor`).

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// How a predictor computes its scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PredictorForm {
    /// A low-rank pair of matrices.
    #[default]
    LowRank,
    /// A copy of the matrix that decides which neurons are active, in a few bits a weight.
    Gate,
}

impl PredictorForm {
    const ALL: [Self; 2] = [Self::LowRank, Self::Gate];

    /// The name in a file.
    pub fn name(self) -> &'static str {
        match self {
            Self::LowRank => "lowrank",
            Self::Gate => "gate",
        }
    }
}

/// The vector that a predictor was made for. Scores of another one mean nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PredictorInput {
    /// What the FFN itself multiplies: normalised where the model does so.
    #[default]
    FfnInput,
    /// The residual stream after attention has been added, before any norm (Deja Vu; PowerInfer for OPT and Llama).
    AttentionResidual,
    /// The residual stream as it comes into the decoder layer, before any norm (PowerInfer for Falcon).
    LayerInput,
}

impl PredictorInput {
    const ALL: [Self; 3] = [Self::FfnInput, Self::AttentionResidual, Self::LayerInput];

    /// The name in a file.
    pub fn name(self) -> &'static str {
        match self {
            Self::FfnInput => "ffn_input",
            Self::AttentionResidual => "attention_residual",
            Self::LayerInput => "layer_input",
        }
    }
}

/// What is done to a low-rank predictor's values between its two matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Between {
    /// Nothing (Deja Vu, the closed form).
    #[default]
    None,
    /// Negative values become 0 (PowerInfer).
    Relu,
}

impl Between {
    const ALL: [Self; 2] = [Self::None, Self::Relu];

    /// The name in a file.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Relu => "relu",
        }
    }
}

impl fmt::Display for PredictorForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for PredictorInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Between {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// By [`PredictorForm::name`].
impl FromStr for PredictorForm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|form| form.name() == name);
        found.ok_or_else(|| unknown("form of predictor", name, "lowrank, gate"))
    }
}

/// By [`PredictorInput::name`].
impl FromStr for PredictorInput {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|input| input.name() == name);
        let known = "ffn_input, attention_residual, layer_input";
        found.ok_or_else(|| unknown("input of predictors", name, known))
    }
}

/// By [`Between::name`].
impl FromStr for Between {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|between| between.name() == name);
        found.ok_or_else(|| unknown("step between a predictor's matrices", name, "none, relu"))
    }
}

fn unknown(what: &'static str, name: &str, known: &'static str) -> Error {
    let name = name.to_owned();
    Error::UnknownName { what, name, known }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_names_they_print_as_and_no_others() {
        for form in PredictorForm::ALL {
            assert_eq!(form.to_string().parse::<PredictorForm>().unwrap(), form);
        }
        for input in PredictorInput::ALL {
            assert_eq!(input.to_string().parse::<PredictorInput>().unwrap(), input);
        }
        for between in Between::ALL {
            assert_eq!(between.to_string().parse::<Between>().unwrap(), between);
        }
        let errors = [
            "low_rank".parse::<PredictorForm>().unwrap_err(),
            "ffn".parse::<PredictorInput>().unwrap_err(),
            "gelu".parse::<Between>().unwrap_err(),
        ];
        let known = [
            "lowrank, gate",
            "ffn_input, attention_residual, layer_input",
            "none, relu",
        ];
        for (error, known) in errors.iter().zip(known) {
            assert!(error.to_string().contains(known), "{error}");
        }
    }
}
