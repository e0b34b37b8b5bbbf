//! Candle's own Llama, unmodified, with its FFNs on flash and most of them left out.
//!
//! `cargo run --release --manifest-path examples/patched/Cargo.toml --bin stock_llama_sparse -- --model DIR --selector dip
//! --density 0.7 --memory 4GiB`, where DIR is a folder converted with `--layout both`: the workspace of the program puts
//! wick-gemm in the place of gemm.

#[path = "common/stock_llama.rs"]
mod common;

use candle::{DType, Device};
use candle_transformers::models::llama::{Cache, Llama};
use candle_wick::FlashVarBuilder;
use clap::Parser;

fn main() -> anyhow::Result<()> {
    let job = common::Job::open(common::Args::parse())?;
    let mut cache = Cache::new(true, DType::F32, &job.config, &Device::Cpu)?;
    let vb = FlashVarBuilder::for_stock(&job.folder, &job.options)?;
    let llama = Llama::load(vb.sparse()?, &job.config)?; // candle's own
    job.write(|piece, position| vb.forward(|| llama.forward(piece, position, &mut cache)))?;
    common::report(&vb.ffn_stats());
    Ok(())
}
