//! The names of selectors, and what each needs to be there.
//!
//! Not here: what they do (`selector`).

use std::fmt;
use std::str::FromStr;

use crate::activation::Activation;
use crate::dip::DipOptions;
use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::predictor_kind::PredictorForm;
use crate::pruning::Pruning;

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
    /// The neurons of the largest gates, the gate matrix being multiplied in whole.
    PruneGate,
    /// The neurons of the largest up factors, the up matrix being multiplied in whole.
    PruneUp,
    /// The neurons of the largest activations, all matrices but down being multiplied in whole.
    PruneGlu,
    /// The neurons whose gate is above a threshold of the layer, which its first tokens set.
    Cats,
}

impl SelectorKind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Dense,
        Self::Oracle,
        Self::LowRank,
        Self::Gate,
        Self::Dip,
        Self::DipCa,
        Self::PruneGate,
        Self::PruneUp,
        Self::PruneGlu,
        Self::Cats,
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
            Self::PruneGate => "prune-gate",
            Self::PruneUp => "prune-up",
            Self::PruneGlu => "prune-glu",
            Self::Cats => "cats",
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
            Self::LowRank => Some(PredictorForm::LowRank),
            Self::Gate => Some(PredictorForm::Gate),
            _ => None,
        }
    }

    /// The selector that was `asked` for, or the one that suits a folder best.
    ///
    /// # Errors
    /// It cannot choose in the folder, with this activation or with what `dip` says.
    pub fn chosen(
        asked: Option<Self>,
        folder: &FlashFolder,
        activation: Activation,
        dip: DipOptions,
    ) -> Result<Self> {
        let selector = match asked {
            Some(selector) => selector,
            None => Self::preferred(folder, activation)?,
        };
        selector.check(folder, activation)?;
        let mut layers = folder.manifest().layers.iter();
        let is_gated = layers.all(|layer| layer.gate.is_some());
        if selector.is_pruning() {
            Pruning::new(selector, dip, is_gated)?;
        } else if selector.is_dip() {
            dip.check(selector)?;
        }
        Ok(selector)
    }

    /// What chooses when nobody says: what uses the folder's predictors where that is exact, and `Dense` elsewhere.
    fn preferred(folder: &FlashFolder, activation: Activation) -> Result<Self> {
        let predictors = match activation.is_relu_like() {
            true => folder.predictors()?,
            false => None,
        };
        Ok(predictors.map_or(Self::Dense, |found| Self::of(found.form)))
    }

    /// Refuses a selector that cannot be exact for `activation`, or lacks what it needs in `folder`.
    pub fn check(self, folder: &FlashFolder, activation: Activation) -> Result<()> {
        self.check_records(folder)?;
        let needs_zeros = self == Self::Oracle || self.form().is_some();
        if needs_zeros && !activation.is_relu_like() {
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

    /// Whether it keeps as many values as a density says: [`DipOptions`](crate::DipOptions).
    pub fn has_density(self) -> bool {
        self.is_dip() || self.is_pruning()
    }

    /// Whether it multiplies a part of a layer in whole, and chooses neurons by what that gives.
    pub(crate) fn is_pruning(self) -> bool {
        matches!(
            self,
            Self::PruneGate | Self::PruneUp | Self::PruneGlu | Self::Cats
        )
    }

    /// Whether FFNs of `folder` are multiplied by columns with it: all of them where there is no other way.
    pub(crate) fn reads_columns(self, folder: &FlashFolder) -> bool {
        let mut layers = folder.manifest().layers.iter();
        self.is_dip() || (self == Self::Dense && layers.any(|layer| !layer.layout.has_neurons()))
    }

    /// Refuses a folder without the records that it goes by.
    fn check_records(self, folder: &FlashFolder) -> Result<()> {
        let mut layers = folder.manifest().layers.iter();
        let (are_there, what, layout) = match self.reads_columns(folder) {
            true => (
                layers.all(|layer| layer.layout.has_columns()),
                "columns",
                "channel",
            ),
            false => (
                layers.all(|layer| layer.layout.has_neurons()),
                "whole neurons",
                "neuron",
            ),
        };
        if are_there {
            return Ok(());
        }
        Err(Error::Selector {
            selector: self.name(),
            reason: format!(
                "{} has no records of {what}; convert the checkpoint with --layout {layout} or both",
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
                known: "dense, oracle, lowrank, gate, dip, dip-ca, prune-gate, prune-up, prune-glu, cats",
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
        let all = SelectorKind::ALL.map(SelectorKind::name).join(", ");
        assert!(error.contains(&all), "{error}");
    }
}
