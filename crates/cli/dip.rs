//! Flags of the selectors that go by a density.

use candle_wick::DipOptions;
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

    /// For --selector dip and dip-ca: keep everything of the prompt's tokens, whose union is nearly everything anyway
    #[arg(long, requires = "selector")]
    dense_prompt: bool,
}

impl DipArgs {
    pub(crate) fn options(&self) -> DipOptions {
        let default = DipOptions::default();
        DipOptions {
            density: self.density.unwrap_or(default.density),
            gamma: self.gamma.unwrap_or(default.gamma),
            dense_prompt: self.dense_prompt,
        }
    }
}

pub(crate) fn gamma(text: &str) -> Result<f64, String> {
    number(text, |value| (0.0..=1.0).contains(&value), "from 0 to 1")
}
