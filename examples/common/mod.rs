//! The loop over tokens that the families' examples share.

mod args;

use std::io::{stdout, Write};
use std::time::Instant;

use anyhow::{ensure, Context};
use candle_wick::{FlashFolder, IoOptions};
use candle_wick_models::{LoadOptions, LoadedModel, TextGenerator, WickTokenizer};
use clap::Parser;

use args::Args;

/// Continues the prompt with a model of `family`, and prints what it took.
pub fn generate(family: &str, prompt: &str) -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = FlashFolder::open(&args.model, IoOptions::default())?;
    let model_type = folder.manifest().model_type.clone();
    ensure!(
        model_type == family,
        "{} holds a model of type {model_type}",
        args.model.display()
    );
    let tokenizer = WickTokenizer::load(folder.path())?.context("the folder has no tokenizer")?;
    let options = LoadOptions {
        memory: args.memory,
        selector: args.selector,
        dip: args.dip(),
        ..LoadOptions::default()
    };
    let mut model = LoadedModel::load(folder, &options)?;
    eprintln!("{}", model.plan());

    let prompt = args.prompt.as_deref().unwrap_or(prompt);
    let tokens = tokenizer.encode(prompt)?;
    let mut stream = tokenizer.stream(&tokens);
    let mut generator = TextGenerator::new(&mut model, &args.sampling(), args.sample_len);
    write!(stdout(), "{prompt}")?;
    generator.prompt(&tokens)?;
    let (start_gen, mut generated_tokens) = (Instant::now(), 0);
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
