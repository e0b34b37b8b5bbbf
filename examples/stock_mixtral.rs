//! Candle's own Mixtral, unmodified: of its experts only those that a token is routed to are read.
//!
//! `cargo run --release --example stock_mixtral -- --model DIR --memory 8GiB`, where DIR is a Hugging Face folder with
//! safetensors; `--ids 1,15,27` takes the place of a prompt.

use std::io::{stdout, Write};

use anyhow::Context;
use candle::{Device, Tensor};
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::models::mixtral::{Config, Model};
use candle_wick::{peak_rss_bytes, stock, HumanBytes, Memory};
use candle_wick_models::WickTokenizer;
use clap::Parser;
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

#[derive(Parser)]
struct Args {
    #[arg(long)]
    model: std::path::PathBuf,
    #[arg(long, default_value = "My favorite theorem is ")]
    prompt: String,
    #[arg(long, value_delimiter = ',')]
    ids: Vec<u32>,
    #[arg(long)]
    memory: Option<Memory>,
    #[arg(long)]
    temperature: Option<f64>,
    #[arg(long, default_value_t = 299792458)]
    seed: u64,
    #[arg(short = 'n', long, default_value_t = 100)]
    sample_len: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    tracing_subscriber::registry().with(stock::layer()).init();
    let config = std::fs::read_to_string(args.model.join("config.json"))?;
    let mut config: serde_json::Value = serde_json::from_str(&config)?;
    config["use_flash_attn"] = false.into(); // candle wants to be told
    let config: Config = serde_json::from_value(config)?;

    let options = stock::StockOptions {
        memory: args.memory,
        ..Default::default()
    };
    let (mut model, handle) = stock::load(&args.model, &options, |vb| Model::new(&config, vb))?;

    let tokenizer = WickTokenizer::load(&args.model)?;
    let (mut tokens, text) = (args.ids.clone(), args.ids.is_empty());
    if text {
        let tokenizer = tokenizer
            .as_ref()
            .context("no tokenizer.json: give --ids")?;
        tokens = tokenizer.encode(&args.prompt)?;
    }
    let mut logits_processor = LogitsProcessor::new(args.seed, args.temperature, None);
    let (prompt_len, mut position) = (tokens.len(), 0);
    let start = std::time::Instant::now();
    while tokens.len() - prompt_len < args.sample_len {
        let input = Tensor::new(&tokens[position..], &Device::Cpu)?.unsqueeze(0)?;
        let logits = handle.forward(|| model.forward(&input, position))?;
        position = tokens.len();
        tokens.push(logits_processor.sample(&logits.flatten_all()?)?);
    }
    match tokenizer.filter(|_| text) {
        Some(tokenizer) => writeln!(stdout(), "{}", tokenizer.decode(&tokens)?)?,
        None => writeln!(stdout(), "{tokens:?}")?,
    }
    let rate = args.sample_len as f64 / start.elapsed().as_secs_f64();
    let (stats, peak) = (handle.stats(), HumanBytes(peak_rss_bytes().unwrap_or(0)));
    println!(
        "{rate:.2} token/s, {} of {} units were on flash, {} read, peak {peak}",
        stats.misses,
        stats.uses,
        HumanBytes(stats.bytes)
    );
    Ok(())
}
