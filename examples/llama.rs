//! Llama inside a memory budget, written as candle's own example; the weights' builder is another.
//!
//! `cargo run --release --example llama -- --model OUT --prompt "My favourite theorem is" --memory 4GiB`

#[path = "common/args.rs"]
mod args;

use std::io::{stdout, Write};

use anyhow::Context;
use candle::{Device, IndexOp, Tensor};
use candle_wick::{
    BudgetPlan, FlashFolder, FlashVarBuilder, IoOptions, Placement, PlanOptions, SelectorKind,
};
use candle_wick_models::{llama::Llama, llama::LlamaConfig};
use candle_wick_models::{CausalLm, Interrupt, ModelConfig, Sampler, WickTokenizer};
use clap::Parser;

use args::Args;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = FlashFolder::open(&args.model, IoOptions::default())?;
    let tokenizer = WickTokenizer::load(folder.path())?.context("no tokenizer.json")?;
    let config: LlamaConfig = serde_json::from_str(&folder.config_json()?)?;
    let prompt = args.prompt.as_deref().unwrap_or("My favorite theorem is ");
    let mut tokens = tokenizer.encode(prompt)?;
    let ctx = (tokens.len() + args.sample_len).min(config.max_position_embeddings());
    let options = PlanOptions {
        memory: args.memory,
        selector: args.selector.unwrap_or(SelectorKind::Dense),
        window_tokens: None,
        process_bytes: 0,
        other_bytes: 0,
    };
    let plan = BudgetPlan::for_machine(&folder, &config.needs(ctx), options)?;
    let placement = Placement {
        dip: args.dip(),
        ..plan.placement()
    };
    let vb = FlashVarBuilder::new(&folder, placement);
    let mut llama = Llama::load(vb, &config, ctx, Interrupt::new())?;
    let mut stream = tokenizer.stream(&tokens);
    let mut sampler = Sampler::new(&args.sampling());
    sampler.observe(&tokens);
    let (prompt_len, mut position) = (tokens.len(), 0);
    write!(stdout(), "{prompt}")?;
    let mut start_gen = None; // the prompt does not count
    while tokens.len() - prompt_len < args.sample_len && tokens.len() <= ctx {
        let input = Tensor::new(&tokens[position..], &Device::Cpu)?.unsqueeze(0)?;
        let logits: Vec<f32> = llama.forward(&input, position)?.i(0)?.to_vec1()?;
        start_gen.get_or_insert_with(std::time::Instant::now);
        position = tokens.len();
        let next_token = sampler.sample(&logits)?;
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
