//! The flags of the families' examples, as in candle's own.

use std::path::PathBuf;

use candle_wick::Memory;
use candle_wick_models::Sampling;
use clap::Parser;

#[derive(Parser)]
pub struct Args {
    /// Converted folder, from `wick convert`.
    #[arg(long)]
    pub model: PathBuf,
    #[arg(long)]
    pub prompt: Option<String>,
    /// 60% of the dense weights, 4GiB in all; without it everything stays in memory.
    #[arg(long)]
    pub memory: Option<Memory>,
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
