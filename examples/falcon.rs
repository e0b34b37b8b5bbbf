//! Falcon inside a memory budget, with the crate doing the loop: load, prompt, `next_token`.
//!
//! `cargo run --release --example falcon -- --model OUT --prompt "The falcon is" --memory 60%`; a relufied
//! checkpoint whose config does not say so is converted with `--activation relu`.

use std::io::{stdout, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use candle_wick::{FlashFolder, IoOptions, Memory};
use candle_wick_models::{LoadOptions, LoadedModel, Sampling, TextGenerator, WickTokenizer};
use clap::Parser;

#[derive(Parser)]
struct Args {
    /// Converted folder, from `wick convert`.
    #[arg(long)]
    model: PathBuf,
    #[arg(long, default_value = "The peregrine falcon is")]
    prompt: String,
    /// 60% of the dense weights, 4GiB in all; without it everything stays in memory.
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

impl Args {
    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            seed: self.seed,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = FlashFolder::open(&args.model, IoOptions::default())?;
    let tokenizer = WickTokenizer::load(folder.path())?.context("the folder has no tokenizer")?;
    let options = LoadOptions {
        memory: args.memory,
        ..LoadOptions::default()
    };
    let mut falcon = LoadedModel::load(folder, &options)?;
    eprintln!("{}", falcon.plan());

    let prompt = tokenizer.encode(&args.prompt)?;
    let mut text = tokenizer.stream(&prompt);
    let mut generator = TextGenerator::new(&mut falcon, &args.sampling(), args.sample_len);
    generator.prompt(&prompt)?;
    write!(stdout(), "{}", args.prompt)?;
    let (start, mut generated) = (Instant::now(), 0);
    while let Some(token) = generator.next_token()? {
        generated += 1;
        write!(stdout(), "{}", text.push(token)?)?;
        stdout().flush()?;
    }
    let rate = f64::from(generated) / start.elapsed().as_secs_f64();
    println!(
        "{}\n\n{generated} tokens generated ({rate:.2} token/s)",
        text.finish()?
    );
    println!(
        "{:.1} % of the neurons they needed were in memory",
        100.0 * falcon.stats().hit_rate()
    );
    Ok(())
}
