//! Persimmon inside a memory budget, with the crate doing the loop: load, prompt, `next_token`.
//!
//! `cargo run --release --example persimmon -- --model OUT --memory 60%`

use std::io::{stdout, Write};

use anyhow::Context;
use candle_wick::{FlashFolder, IoOptions, Memory};
use candle_wick_models::{LoadOptions, LoadedModel, Sampling, TextGenerator, WickTokenizer};
use clap::Parser;

#[derive(Parser)]
struct Args {
    /// Converted folder, from `wick convert`.
    #[arg(long)]
    model: std::path::PathBuf,
    #[arg(long, default_value = "human: Which fruit ripens last?\n\nadept:")]
    prompt: String,
    #[arg(long)]
    memory: Option<Memory>,
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    #[arg(long)]
    top_p: Option<f64>,
    #[arg(long)]
    top_k: Option<usize>,
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
    let tokenizer = WickTokenizer::load(&args.model)?.context("no tokenizer.json")?;
    let options = LoadOptions {
        memory: args.memory,
        ..Default::default()
    };
    let mut model = LoadedModel::load(folder, &options)?;
    eprintln!("{}", model.plan());

    let sampling = Sampling {
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        seed: args.seed,
        repeat_penalty: args.repeat_penalty,
        repeat_last_n: args.repeat_last_n,
    };
    let tokens = tokenizer.encode(&args.prompt)?;
    let mut stream = tokenizer.stream(&tokens);
    let mut generator = TextGenerator::new(&mut model, &sampling, args.sample_len);
    write!(stdout(), "{}", args.prompt)?;
    generator.prompt(&tokens)?;
    let (start_gen, mut generated_tokens) = (std::time::Instant::now(), 0);
    while let Some(next_token) = generator.next_token()? {
        generated_tokens += 1;
        write!(stdout(), "{}", stream.push(next_token)?)?;
        stdout().flush()?;
    }
    let rate = generated_tokens as f64 / start_gen.elapsed().as_secs_f64();
    println!(
        "{}\n\n{generated_tokens} tokens generated ({rate:.2} token/s)",
        stream.finish()?
    );
    let stats = model.stats();
    println!(
        "{:.1} % of the neurons selected, {:.1} % of these were in memory",
        100.0 * stats.selected_fraction(),
        100.0 * stats.hit_rate()
    );
    Ok(())
}
