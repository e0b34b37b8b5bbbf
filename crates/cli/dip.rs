//! Flags of the selectors that go by a density.

use anyhow::{ensure, Result};
use candle_wick::{DipOptions, SelectorKind};
use clap::Args;

use crate::args::{number, share};

/// How much is kept.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct DipArgs {
    /// For --selector dip, dip-ca, prune-* and cats: share of the FFN weights that a token is multiplied with, as 0.5 or 50% [default: 0.5]
    #[arg(long, value_name = "SHARE", value_parser = share, requires = "selector")]
    density: Option<f64>,

    /// For --selector dip-ca: factor of a value whose column is not in memory, from 0 (what is in memory first) to 1 (as
    /// dip) [default: 0.2]
    #[arg(long, value_name = "FACTOR", value_parser = gamma, requires = "selector")]
    gamma: Option<f64>,

    /// For --selector dip and dip-ca: keep everything of the prompt's tokens, whose union is nearly everything anyway; without it
    /// dip-ca takes a prompt token by token, which is many times slower
    #[arg(long, requires = "selector")]
    dense_prompt: bool,
}

impl DipArgs {
    /// Refuses flags that `selector` has no use for.
    pub(crate) fn check(&self, selector: Option<SelectorKind>) -> Result<()> {
        let is = |is_so: fn(SelectorKind) -> bool| selector.is_some_and(is_so);
        for (is_given, flag, is_of_use, whose) in [
            (
                self.density.is_some(),
                "--density",
                is(SelectorKind::has_density),
                "dip, dip-ca, prune-* and cats",
            ),
            (
                self.gamma.is_some(),
                "--gamma",
                selector == Some(SelectorKind::DipCa),
                "dip-ca",
            ),
            (
                self.dense_prompt,
                "--dense-prompt",
                is(SelectorKind::is_dip),
                "dip and dip-ca",
            ),
        ] {
            ensure!(
                !is_given || is_of_use,
                "{flag} is for --selector {whose}, and has no meaning for another"
            );
        }
        Ok(())
    }

    pub(crate) fn options(&self) -> DipOptions {
        let default = DipOptions::default();
        DipOptions {
            density: self.density.unwrap_or(default.density),
            gamma: self.gamma.unwrap_or(default.gamma),
            dense_prompt: self.dense_prompt,
        }
    }
}

pub(crate) fn gamma(text: &str) -> std::result::Result<f64, String> {
    number(text, |value| (0.0..=1.0).contains(&value), "from 0 to 1")
}
