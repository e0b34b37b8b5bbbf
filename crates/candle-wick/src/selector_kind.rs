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
    /// The largest inputs, and the largest activations: see [`DipOptions`](crate::DipOptions).
    Dip,
    /// As `Dip`, with a preference for what is in memory.
    DipCa,
}

impl SelectorKind {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Dense,
        Self::Oracle,
        Self::LowRank,
        Self::Gate,
        Self::Dip,
        Self::DipCa,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Oracle => "oracle",
            Self::LowRank => PredictorForm::LowRank.name(),
            Self::Gate => PredictorForm::Gate.name(),
            Self::Dip => "dip",
            Self::DipCa => "dip-ca",
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
            Self::Dense | Self::Oracle | Self::Dip | Self::DipCa => None,
            Self::LowRank => Some(PredictorForm::LowRank),
            Self::Gate => Some(PredictorForm::Gate),
        }
    }

    /// Refuses a selector that cannot be exact for `activation`, or lacks what it needs in `folder`.
    pub fn check(self, folder: &FlashFolder, activation: Activation) -> Result<()> {
        if self.is_dip() {
            return self.check_columns(folder);
        }
        if self != Self::Dense && !activation.is_relu_like() {
            return Err(Error::Selector {
                selector: self.name(),
                reason: format!(
                    "activation {} is never exactly zero, so no neuron can be skipped; use dense, \
                     or dip, which leaves out what matters least",
                    activation.name()
                ),
            });
        }
        if let Some(form) = self.form() {
            folder.needed_predictors(form)?;
        }
        Ok(())
    }

    /// Whether it chooses of inputs and activations, and not of neurons.
    pub fn is_dip(self) -> bool {
        matches!(self, Self::Dip | Self::DipCa)
    }

    /// Whether FFNs of `folder` are multiplied by columns with it: all of them where there is no other way.
    pub(crate) fn reads_columns(self, folder: &FlashFolder) -> bool {
        let mut layers = folder.manifest().layers.iter();
        self.is_dip() || (self == Self::Dense && layers.any(|layer| !layer.layout.has_neurons()))
    }

    fn check_columns(self, folder: &FlashFolder) -> Result<()> {
        let mut layers = folder.manifest().layers.iter();
        if layers.all(|layer| layer.layout.has_columns()) {
            return Ok(());
        }
        Err(Error::Selector {
            selector: self.name(),
            reason: format!(
                "{} has no records of columns; convert the checkpoint with --layout channel or both",
                folder.path().display()
            ),
        })
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
        let mut all = Self::ALL.into_iter();
        all.find(|kind| kind.name() == name)
            .ok_or_else(|| Error::UnknownName {
                what: "selector",
                name: name.to_owned(),
                known: "dense, oracle, lowrank, gate, dip, dip-ca",
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_have_the_names_they_print_as() {
        for kind in SelectorKind::ALL {
            assert_eq!(kind.to_string().parse::<SelectorKind>().unwrap(), kind);
            assert!(kind
                .form()
                .is_none_or(|form| SelectorKind::of(form) == kind));
        }
        let error = "all".parse::<SelectorKind>().unwrap_err().to_string();
        assert!(error.contains("lowrank, gate, dip, dip-ca"), "{error}");
    }
}
