//! Candle's own quantized Llama, unmodified and unquantized, with its weights on flash: no patch, no unsafe code.
//!
//! `cargo run --release --example stock_quantized_llama -- --model DIR --selector dip --density 0.7 --memory 4GiB`, where DIR is a
//! folder converted with `--layout both`. Its constructor knows Llama 2 and TinyLlama: other rotary bases are refused.

use anyhow::Context;
use candle::{Device, Tensor};
use candle_transformers::models::llama::{LlamaConfig, LlamaEosToks};
use candle_transformers::models::quantized_llama::ModelWeights;
use candle_wick::{
    DipOptions, FlashFolder, FlashVarBuilder, IoOptions, Memory, SelectorKind, SparseOptions,
};
use candle_wick_models::WickTokenizer;
use clap::Parser;
use std::io::{stdout, Write};

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
    #[arg(short = 'n', default_value_t = 100)]
    sample_len: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = FlashFolder::open(&args.model, IoOptions::default())?;
    let config = serde_json::from_str::<LlamaConfig>(&folder.config_json()?)?.into_config(false);
    let tokenizer = WickTokenizer::load(&args.model)?.context("no tokenizer.json")?;
    let options = SparseOptions {
        memory: args.memory,
        selector: args.selector,
        dip: DipOptions {
            density: args.density,
            ..Default::default()
        },
        ..Default::default()
    };
    let (content, gqa) = FlashVarBuilder::for_quantized_llama(&folder, &options)?.ggml_content()?;
    let mut llama = ModelWeights::from_ggml(content, gqa)?; // candle's own
    let ends = match &config.eos_token_id {
        Some(LlamaEosToks::Single(id)) => vec![*id],
        Some(LlamaEosToks::Multiple(ids)) => ids.clone(),
        None => vec![],
    };
    let mut tokens = tokenizer.encode(&args.prompt)?;
    let mut stream = tokenizer.stream(&tokens);
    let (prompt_len, mut position) = (tokens.len(), 0);
    write!(stdout(), "{}", args.prompt)?;
    while tokens.len() - prompt_len < args.sample_len {
        let mut logits = None;
        while position < tokens.len() {
            // In pieces, so that a long prompt takes no more memory than a short one.
            let piece = &tokens[position..tokens.len().min(position + 128)];
            let input = Tensor::new(piece, &Device::Cpu)?.unsqueeze(0)?;
            logits = Some(llama.forward(&input, position)?);
            position += piece.len();
        }
        let logits = logits.context("an empty prompt")?;
        let next = logits.squeeze(0)?.argmax(0)?.to_scalar::<u32>()?;
        if ends.contains(&next) {
            break;
        }
        tokens.push(next);
        write!(stdout(), "{}", stream.push(next)?)?;
        stdout().flush()?;
    }
    println!("{}", stream.finish()?);
    Ok(())
}
