//! Candle's own Falcon, unmodified, with its FFNs on flash.
//!
//! `cargo run --release --manifest-path examples/patched/Cargo.toml --bin stock_falcon -- --model DIR --memory 6GiB`, where DIR is a
//! converted folder of a Falcon of the 7B shape: the workspace of the program puts wick-gemm in the place of gemm.

use std::io::{stdout, Write};

use anyhow::Context;
use candle::{Device, Tensor};
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::models::falcon::{Config, Falcon};
use candle_wick::{FlashFolder, FlashVarBuilder, IoOptions, Memory, SparseOptions};
use candle_wick_models::WickTokenizer;
use clap::Parser;

#[derive(Parser)]
struct Args {
    #[arg(long)]
    model: std::path::PathBuf,
    #[arg(long, default_value = "My favorite theorem is ")]
    prompt: String,
    /// 60% of the weights, 4GiB in all; without it everything stays in memory.
    #[arg(long)]
    memory: Option<Memory>,
    #[arg(short = 'n', long, default_value_t = 100)]
    sample_len: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = FlashFolder::open(&args.model, IoOptions::default())?;
    let json: serde_json::Value = serde_json::from_str(&folder.config_json()?)?;
    let size = |key: &str| {
        json[key]
            .as_u64()
            .map(|size| size as usize)
            .context("a size of the config")
    };
    let config = Config {
        vocab_size: size("vocab_size")?,
        hidden_size: size("hidden_size")?,
        num_hidden_layers: size("num_hidden_layers")?,
        num_attention_heads: size("num_attention_heads")?,
        ..Config::falcon7b()
    };
    let tokenizer = WickTokenizer::load(&args.model)?.context("the folder has no tokenizer")?;

    let options = SparseOptions {
        memory: args.memory,
        ..Default::default()
    };
    let vb = FlashVarBuilder::for_stock(&folder, &options)?;
    let mut falcon = Falcon::load(vb.sparse()?, config.clone())?;

    let mut tokens = tokenizer.encode(&args.prompt)?;
    anyhow::ensure!(!tokens.is_empty(), "an empty prompt");
    let mut stream = tokenizer.stream(&tokens);
    let mut logits_processor = LogitsProcessor::new(299792458, None, None);
    let (prompt_len, mut position) = (tokens.len(), 0);
    let start = std::time::Instant::now();
    write!(stdout(), "{}", args.prompt)?;
    while tokens.len() - prompt_len < args.sample_len {
        let input = Tensor::new(&tokens[position..], &Device::Cpu)?.unsqueeze(0)?;
        let logits = vb.forward(|| falcon.forward(&input))?;
        position = tokens.len();
        let next = logits_processor.sample(&logits.squeeze(0)?)?;
        if next == config.eos_token_id {
            break;
        }
        tokens.push(next);
        write!(stdout(), "{}", stream.push(next)?)?;
        stdout().flush()?;
    }
    let rate = (tokens.len() - prompt_len) as f64 / start.elapsed().as_secs_f64();
    println!("{}\n\n{rate:.2} token/s", stream.finish()?);
    Ok(())
}
