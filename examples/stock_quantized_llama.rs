//! Candle's own quantized Llama, unmodified and unquantized, with its weights on flash: no patch, no unsafe code.
//!
//! `cargo run --release --example stock_quantized_llama -- --model DIR --selector dip --density 0.7 --memory 4GiB`, where DIR is a
//! folder converted with `--layout both`. Its constructor knows Llama 2 and TinyLlama: other rotary bases are refused.

#[path = "common/stock_llama.rs"]
mod common;

use candle_transformers::models::quantized_llama::ModelWeights;
use candle_wick::FlashVarBuilder;
use clap::Parser;

fn main() -> anyhow::Result<()> {
    let job = common::Job::open(common::Args::parse())?;
    let vb = FlashVarBuilder::for_quantized_llama(&job.folder, &job.options)?;
    let (content, gqa) = vb.ggml_content()?;
    let mut llama = ModelWeights::from_ggml(content, gqa)?; // candle's own
    job.write(|piece, position| llama.forward(piece, position))?;
    common::report(&vb.ffn_stats());
    Ok(())
}
