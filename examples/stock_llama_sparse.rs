//! Candle's own Llama, unmodified, with its FFNs on flash and most of them left out.
//!
//! `cargo run --release --example stock_llama_sparse -- --model DIR --selector dip --density 0.7 --memory 4GiB`, where DIR is a
//! converted folder (`--layout both` for dip). Its workspace has to put wick-gemm in the place of gemm: `examples/patched`.

use std::io::{stdout, Write};

use anyhow::Context;
use candle::{DType, Device, Tensor};
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig, LlamaEosToks};
use candle_wick::{
    DipOptions, FlashFolder, FlashVarBuilder, IoOptions, Memory, SelectorKind, SparseOptions,
};
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
    #[arg(long)]
    selector: Option<SelectorKind>,
    #[arg(long, default_value_t = DipOptions::default().density)]
    density: f64,
    #[arg(short = 'n', long, default_value_t = 100)]
    sample_len: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = FlashFolder::open(&args.model, IoOptions::default())?;
    let config = serde_json::from_str::<LlamaConfig>(&folder.config_json()?)?.into_config(false);
    let tokenizer = WickTokenizer::load(&args.model)?.context("no tokenizer.json")?;

    let dip = DipOptions {
        density: args.density,
        ..Default::default()
    };
    let (memory, selector) = (args.memory, args.selector);
    let options = SparseOptions {
        memory,
        selector,
        dip,
        ..Default::default()
    };
    let vb = FlashVarBuilder::for_stock(&folder, &options)?;
    let llama = Llama::load(vb.sparse()?, &config)?;
    let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu)?;

    let mut tokens = tokenizer.encode(&args.prompt)?;
    let mut stream = tokenizer.stream(&tokens);
    let mut logits_processor = LogitsProcessor::new(299792458, None, None);
    let (prompt_len, mut position) = (tokens.len(), 0);
    let start = std::time::Instant::now();
    write!(stdout(), "{}", args.prompt)?;
    while tokens.len() - prompt_len < args.sample_len {
        let input = Tensor::new(&tokens[position..], &Device::Cpu)?.unsqueeze(0)?;
        let logits = vb.forward(|| llama.forward(&input, position, &mut cache))?;
        position = tokens.len();
        let next = logits_processor.sample(&logits.squeeze(0)?)?;
        if matches!(config.eos_token_id, Some(LlamaEosToks::Single(eos)) if eos == next) {
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
