//! Candle's own Llama, unmodified, with less memory than its weights.
//!
//! `cargo run --release --example stock_llama -- --model DIR --memory 4GiB`, where DIR is a Hugging Face folder with
//! safetensors, not converted, or a converted one.

use std::io::{stdout, Write};

use anyhow::Context;
use candle::{DType, Device, Tensor};
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig, LlamaEosToks};
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
    /// 60% of the weights, 4GiB in all; without it everything stays in memory.
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
    let config = serde_json::from_str::<LlamaConfig>(&config)?.into_config(false);
    let tokenizer = WickTokenizer::load(&args.model)?.context("no tokenizer.json")?;

    let options = stock::StockOptions {
        memory: args.memory,
        ..Default::default()
    };
    let (llama, handle) = stock::load(&args.model, &options, |vb| Llama::load(vb, &config))?;
    let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu)?;

    let mut tokens = tokenizer.encode(&args.prompt)?;
    let mut stream = tokenizer.stream(&tokens);
    let mut logits_processor = LogitsProcessor::new(args.seed, args.temperature, None);
    let (prompt_len, mut position) = (tokens.len(), 0);
    let start = std::time::Instant::now();
    write!(stdout(), "{}", args.prompt)?;
    while tokens.len() - prompt_len < args.sample_len {
        let input = Tensor::new(&tokens[position..], &Device::Cpu)?.unsqueeze(0)?;
        let logits = handle.forward(|| llama.forward(&input, position, &mut cache))?;
        position = tokens.len();
        let next = logits_processor.sample(&logits.squeeze(0)?)?;
        let is_end = match &config.eos_token_id {
            Some(LlamaEosToks::Single(eos)) => *eos == next,
            Some(LlamaEosToks::Multiple(all)) => all.contains(&next),
            None => false,
        };
        if is_end {
            break;
        }
        tokens.push(next);
        write!(stdout(), "{}", stream.push(next)?)?;
        stdout().flush()?;
    }
    let rate = (tokens.len() - prompt_len) as f64 / start.elapsed().as_secs_f64();
    let (read, peak) = (handle.stats().bytes, peak_rss_bytes().unwrap_or(0));
    println!(
        "\n\n{rate:.2} token/s, {} read, peak {}",
        HumanBytes(read),
        HumanBytes(peak)
    );
    Ok(())
}
