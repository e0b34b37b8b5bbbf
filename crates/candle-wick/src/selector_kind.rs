//! The names of selectors, and what each needs to be there.
//!
//! Not here: what they do (`selector`).

use std::fmt;
use std::str::FromStr;

use crate::activation::Activation;
use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::predictor_kind::PredictorForm;

/// The name of a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectorKind {
    /// Every neuron.
    Dense,
    /// The truly active neurons of a ReLU-family layer, found by reading all of it.
    Oracle,
    /// The neurons that a low-rank predictor expects to be active.
    LowRank,
    /// The neurons that a quantised copy of the deciding matrix expects to be active.
    Gate,
}

impl SelectorKind {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Oracle => "oracle",
            Self::LowRank => PredictorForm::LowRank.name(),
            Self::Gate => PredictorForm::Gate.name(),
        }
    }

    /// The selector that uses predictors of this form.
    pub fn of(form: PredictorForm) -> Self {
        match form {
            PredictorForm::LowRank => Self::LowRank,
            PredictorForm::Gate => Self::Gate,
        }
    }

    /// The form of the predictors that it uses, if it uses some.
    pub fn form(self) -> Option<PredictorForm> {
        match self {
            Self::Dense | Self::Oracle => None,
            Self::LowRank => Some(PredictorForm::LowRank),
            Self::Gate => Some(PredictorForm::Gate),
        }
    }

    /// Refuses a selector that cannot be exact for `activation`, or lacks what it needs in `folder`.
    pub fn check(self, folder: &FlashFolder, activation: Activation) -> Result<()> {
        if self != Self::Dense && !activation.is_relu_like() {
            return Err(Error::Selector {
                selector: self.name(),
                reason: format!(
                    "activation {} is never exactly zero, so no neuron can be skipped; use dense \
                     (dip, for such models, is not there yet)",
                    activation.name()
                ),
            });
        }
        if let Some(form) = self.form() {
            folder.needed_predictors(form)?;
        }
        Ok(())
    }
}

impl fmt::Display for SelectorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SelectorKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "dense" => Ok(Self::Dense),
            "oracle" => Ok(Self::Oracle),
            "lowrank" => Ok(Self::LowRank),
            "gate" => Ok(Self::Gate),
            _ => Err(Error::UnknownName {
                what: "selector",
                name: name.to_owned(),
                known: "dense, oracle, lowrank, gate",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_have_the_names_they_print_as() {
        use SelectorKind::{Dense, Gate, LowRank, Oracle};
        for kind in [Dense, Oracle, LowRank, Gate] {
            assert_eq!(kind.to_string().parse::<SelectorKind>().unwrap(), kind);
            assert!(kind
                .form()
                .is_none_or(|form| SelectorKind::of(form) == kind));
        }
        let error = "all".parse::<SelectorKind>().unwrap_err().to_string();
        assert!(error.contains("dense, oracle, lowrank, gate"), "{error}");
    }
}
