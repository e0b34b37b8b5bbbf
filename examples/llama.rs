//! Llama inside a memory budget, written as candle's own example; the weights' builder is another.
//!
//! `cargo run --release --example llama -- --model OUT --prompt "My favourite theorem is" --memory 4GiB`

use std::io::{stdout, Write};

use anyhow::Context;
use candle::{Device, IndexOp, Tensor};
use candle_transformers::{generation::LogitsProcessor, utils::apply_repeat_penalty};
use candle_wick::{
    current_rss_bytes, BudgetPlan, FlashFolder, FlashVarBuilder, IoOptions, Memory, PlanOptions,
    SelectorKind,
};
use candle_wick_models::{llama::Llama, llama::LlamaConfig};
use candle_wick_models::{CausalLm, Interrupt, ModelConfig, WickTokenizer};
use clap::Parser;

#[derive(Parser)]
struct Args {
    #[arg(long)]
    model: std::path::PathBuf,
    #[arg(long, default_value = "My favorite theorem is ")]
    prompt: String,
    #[arg(long)]
    memory: Option<Memory>,
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    #[arg(long)]
    top_p: Option<f64>,
    #[arg(long, default_value_t = 299792458)]
    seed: u64,
    #[arg(short = 'n', long, default_value_t = 100)]
    sample_len: usize,
    #[arg(long, default_value_t = 1.1)]
    repeat_penalty: f32,
    #[arg(long, default_value_t = 64)]
    repeat_last_n: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = FlashFolder::open(&args.model, IoOptions::default())?;
    let tokenizer = WickTokenizer::load(folder.path())?.context("no tokenizer.json")?;
    let config: LlamaConfig = serde_json::from_str(&folder.config_json()?)?;
    let mut tokens = tokenizer.encode(&args.prompt)?;
    let ctx = (tokens.len() + args.sample_len).min(config.max_position_embeddings());
    let options = PlanOptions {
        memory: args.memory,
        selector: SelectorKind::Dense,
        window_tokens: None,
        process_bytes: current_rss_bytes().unwrap_or(0),
    };
    let plan = BudgetPlan::new(&folder, &config.needs(ctx), &options)?;
    let vb = FlashVarBuilder::new(&folder, plan.placement());
    let mut llama = Llama::load(vb, &config, ctx, Interrupt::new())?;
    let mut stream = tokenizer.stream(&tokens);
    let mut logits_processor = LogitsProcessor::new(args.seed, Some(args.temperature), args.top_p);
    let (prompt_len, mut position) = (tokens.len(), 0);
    write!(stdout(), "{}", args.prompt)?;
    let mut start_gen = None; // the prompt does not count
    while tokens.len() - prompt_len < args.sample_len && tokens.len() <= ctx {
        let input = Tensor::new(&tokens[position..], &Device::Cpu)?.unsqueeze(0)?;
        let logits = llama.forward(&input, position)?.i(0)?;
        start_gen.get_or_insert_with(std::time::Instant::now);
        position = tokens.len();
        let recent = &tokens[position.saturating_sub(args.repeat_last_n)..];
        let logits = apply_repeat_penalty(&logits, args.repeat_penalty, recent)?;
        let next_token = logits_processor.sample(&logits)?;
        tokens.push(next_token);
        if Some(next_token) == tokenizer.token_id("</s>") {
            break;
        }
        write!(stdout(), "{}", stream.push(next_token)?)?;
        stdout().flush()?;
    }
    let generated = tokens.len() - prompt_len;
    let seconds = start_gen.map_or(1., |start| start.elapsed().as_secs_f64());
    let rate = generated.saturating_sub(1) as f64 / seconds;
    print!("{}\n\n", stream.finish()?);
    println!("{generated} tokens generated ({rate:.2} token/s)");
    Ok(())
}
