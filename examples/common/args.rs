//! The flags of the families' examples, as in candle's own.

use std::path::PathBuf;

use candle_wick::{DipOptions, Memory, SelectorKind};
use candle_wick_models::Sampling;
use clap::Parser;

#[derive(Parser)]
pub struct Args {
    /// Converted folder, from `wick convert`.
    #[arg(long, alias = "model-id")]
    pub model: PathBuf,
    #[arg(long)]
    pub prompt: Option<String>,
    /// 60% of the dense weights, 4GiB in all; without it everything stays in memory.
    #[arg(long)]
    pub memory: Option<Memory>,
    /// dense, oracle, lowrank, dip or dip-ca; by default lowrank where there are predictors, else dense.
    #[arg(long)]
    pub selector: Option<SelectorKind>,
    /// Share of the FFN weights that dip and dip-ca keep.
    #[arg(long, default_value_t = DipOptions::default().density)]
    pub density: f64,
    /// What dip-ca multiplies a value with whose column is not in memory.
    #[arg(long, default_value_t = DipOptions::default().gamma)]
    pub gamma: f64,
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    #[arg(long)]
    pub top_p: Option<f64>,
    #[arg(long)]
    pub top_k: Option<usize>,
    #[arg(long, default_value_t = 299792458)]
    pub seed: u64,
    #[arg(short = 'n', long, default_value_t = 100)]
    pub sample_len: usize,
    #[arg(long, default_value_t = 1.1)]
    pub repeat_penalty: f32,
    #[arg(long, default_value_t = 64)]
    pub repeat_last_n: usize,
}

impl Args {
    pub fn dip(&self) -> DipOptions {
        DipOptions {
            density: self.density,
            gamma: self.gamma,
            ..DipOptions::default()
        }
    }

    pub fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            seed: self.seed,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
        }
    }
}
