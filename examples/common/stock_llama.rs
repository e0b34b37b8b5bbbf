//! What the programs around candle's own Llamas share: flags, the plan's options, the greedy loop.

use std::io::{stdout, Write};

use anyhow::{ensure, Context};
use candle::{Device, Tensor};
use candle_transformers::models::llama::{Config, LlamaConfig, LlamaEosToks};
use candle_wick::{
    peak_rss_bytes, DipOptions, FfnStats, FlashFolder, IoOptions, Memory, SelectorKind,
    SparseOptions,
};
use candle_wick_models::WickTokenizer;
use clap::Parser;

#[derive(Parser)]
pub struct Args {
    /// Converted folder, from `wick convert ... --layout both`.
    #[arg(long)]
    model: std::path::PathBuf,
    #[arg(long, default_value = "My favorite theorem is ")]
    prompt: String,
    /// 60% of the weights, 4GiB in all; without it everything stays in memory.
    #[arg(long)]
    memory: Option<Memory>,
    /// dense, dip, dip-ca, or, to compare with them, prune-gate, prune-up, prune-glu, cats; dense by default.
    #[arg(long)]
    selector: Option<SelectorKind>,
    /// Share of the FFN weights that a token is multiplied with.
    #[arg(long, default_value_t = DipOptions::default().density, requires = "selector")]
    density: f64,
    /// Tokens to write.
    #[arg(short = 'n', default_value_t = 100)]
    sample_len: usize,
}

/// A model to load, and a text to write.
pub struct Job {
    pub folder: FlashFolder,
    pub config: Config,
    pub options: SparseOptions,
    tokenizer: WickTokenizer,
    prompt: String,
    tokens: Vec<u32>,
    sample_len: usize,
}

impl Job {
    pub fn open(args: Args) -> anyhow::Result<Self> {
        let folder = FlashFolder::open(&args.model, IoOptions::default())?;
        let config = serde_json::from_str::<LlamaConfig>(&folder.config_json()?)?;
        let config = config.into_config(false);
        let tokenizer = WickTokenizer::load(&args.model)?;
        let tokenizer = tokenizer.context("the folder has no tokenizer")?;
        let tokens = tokenizer.encode(&args.prompt)?;
        ensure!(!tokens.is_empty(), "the prompt has no tokens");
        let mut options = SparseOptions {
            memory: args.memory,
            selector: args.selector,
            ..Default::default()
        };
        options.dip.density = args.density;
        // Keys and values of every position, in f32.
        let head_dim = config.hidden_size / config.num_attention_heads.max(1);
        let kv_values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim;
        let positions = tokens.len().saturating_add(args.sample_len);
        options.reserve_bytes += positions.saturating_mul(4 * kv_values) as u64;
        Ok(Self {
            folder,
            config,
            options,
            tokenizer,
            prompt: args.prompt,
            tokens,
            sample_len: args.sample_len,
        })
    }

    /// Writes on with the likeliest tokens; `forward` gives the last logits of a piece of the text and its position.
    pub fn write(
        self,
        mut forward: impl FnMut(&Tensor, usize) -> candle::Result<Tensor>,
    ) -> anyhow::Result<()> {
        let ends = match &self.config.eos_token_id {
            Some(LlamaEosToks::Single(id)) => vec![*id],
            Some(LlamaEosToks::Multiple(ids)) => ids.clone(),
            None => vec![],
        };
        let (mut tokens, mut position) = (self.tokens, 0);
        let mut stream = self.tokenizer.stream(&tokens);
        write!(stdout(), "{}", self.prompt)?;
        for _ in 0..self.sample_len {
            let mut logits = None;
            while position < tokens.len() {
                // In pieces, since what is computed takes memory for each of their tokens.
                let piece = &tokens[position..tokens.len().min(position + 128)];
                let input = Tensor::new(piece, &Device::Cpu)?.unsqueeze(0)?;
                logits = Some(forward(&input, position)?);
                position += piece.len();
            }
            let logits = logits.context("no token to go on from")?;
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
}

/// Prints what the layers did.
pub fn report(layers: &[FfnStats]) {
    let mut all = FfnStats::default();
    for layer in layers {
        all += *layer;
    }
    println!(
        "\n{:.1} % of the FFN selected, {:.1} % of this was in memory; peak {} MiB",
        100.0 * all.selected_fraction(),
        100.0 * all.hit_rate(),
        peak_rss_bytes().unwrap_or(0) >> 20
    );
}
