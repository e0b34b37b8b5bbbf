//! `wick score`: how likely a model finds a text, whole or in blocks.
//!
//! Blocks are how perplexity over a long text is usually measured: the text is tokenised once, cut into blocks that
//! do not overlap, and each block is a text of its own, whose first token is given and whose others are targets.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{ensure, Result};
use candle_wick_models::{block_nll, score, Blocks, Error, Interrupt, LoadedModel};
use clap::Args;
use serde::Serialize;

use crate::args::{positive, ModelArgs, OpenedModel, TokenIds};
use crate::output;
use crate::prompt::{read_file, Prompt};

#[derive(Args, Debug)]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    text: TextArgs,

    #[command(flatten)]
    blocks: BlockArgs,

    /// Leave out the special tokens that the tokenizer adds to a text, such as a BOS
    #[arg(long, conflicts_with = "ids")]
    no_bos: bool,

    /// Print one JSON object: ids, logprobs, last_logits; with blocks the means, over all and by block
    #[arg(long)]
    json: bool,
}

/// A long text in parts.
#[derive(Args, Debug)]
struct BlockArgs {
    /// Score blocks of COUNT tokens, each as a text of its own; what is left at the end is dropped
    #[arg(long, value_name = "COUNT", value_parser = block_tokens)]
    block_tokens: Option<usize>,

    /// Score the first COUNT blocks alone
    #[arg(long, value_name = "COUNT", value_parser = positive, requires = "block_tokens")]
    blocks: Option<usize>,
}

/// At least two: the first token of a block is given, the others are targets.
fn block_tokens(text: &str) -> Result<usize, String> {
    match positive(text)? {
        1 => Err("must be at least 2: a block's first token is no target".to_owned()),
        count => Ok(count),
    }
}

#[derive(Args, Debug)]
#[group(multiple = false, required = true)]
struct TextArgs {
    /// Text to score
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    text: Option<String>,

    /// File with the text to score
    #[arg(long, value_name = "FILE")]
    text_file: Option<PathBuf>,

    /// Token ids to score, such as 1,2,3; needs no tokenizer
    #[arg(long, value_name = "IDS")]
    ids: Option<TokenIds>,
}

impl TextArgs {
    fn read(&self) -> Result<Prompt> {
        Ok(match (&self.ids, &self.text, &self.text_file) {
            (Some(TokenIds(ids)), _, _) => Prompt::Ids(ids.clone()),
            (_, Some(text), _) => Prompt::Text(text.clone()),
            (_, _, Some(path)) => Prompt::Text(read_file(path)?),
            (None, None, None) => unreachable!("the argument group is required"),
        })
    }
}

/// What blocks of a text add up to.
#[derive(Serialize)]
struct BlockScore {
    block_tokens: usize,
    blocks: usize,
    /// Tokens that were predicted: all but the first of each block.
    targets: usize,
    /// Tokens of the text that are in no block.
    dropped_tokens: usize,
    /// Mean negative log-probability of a target, natural logarithm.
    mean_nll: f64,
    perplexity: f64,
    /// The same mean within each block.
    block_nll: Vec<f64>,
}

pub(crate) fn run(args: &ScoreArgs) -> Result<ExitCode> {
    let opened = args.model.open(Interrupt::new())?;
    let ids = args.ids(&opened)?;
    if let Some(tuned) = opened.tuned_line() {
        output::note(&format!("tuned: {tuned}"));
    }
    match args.blocks.block_tokens {
        Some(tokens) => blocks(args, opened, &ids, tokens)?,
        None => whole(args, opened, &ids)?,
    }
    Ok(ExitCode::SUCCESS)
}

impl ScoreArgs {
    fn ids(&self, opened: &OpenedModel) -> Result<Vec<u32>> {
        match (self.text.read()?, &opened.tokenizer) {
            (Prompt::Text(text), Some(tokenizer)) if self.no_bos => {
                Ok(tokenizer.encode_bare(&text)?)
            }
            (text, _) => text.encode(opened),
        }
    }
}

fn whole(args: &ScoreArgs, opened: OpenedModel, ids: &[u32]) -> Result<()> {
    opened.check_length(ids)?;
    let mut model = LoadedModel::load(opened.folder, &opened.options)?;
    let score = score(&mut model, ids)?;
    check_finite(score.logprobs.iter().copied())?;
    check_finite(score.last_logits.iter().map(|logit| f64::from(*logit)))?;
    if args.json {
        return output::print_json(&score);
    }
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
    output::print(&format!(
        "tokens      {}\nmean nll    {}\nperplexity  {}\n",
        score.ids.len(),
        number(score.mean_nll()),
        number(score.perplexity())
    ))
}

fn blocks(args: &ScoreArgs, opened: OpenedModel, ids: &[u32], block_tokens: usize) -> Result<()> {
    let blocks = Blocks::cut(ids, block_tokens, args.blocks.blocks.unwrap_or(usize::MAX))?;
    opened.check_length(&ids[..block_tokens])?;
    let mut model = LoadedModel::load(opened.folder, &opened.options)?;
    let mut mean_of = |block| -> Result<f64> {
        Ok(block_nll(&mut model, block)? / blocks.targets_per_block() as f64)
    };
    let block_nll = blocks
        .iter()
        .map(&mut mean_of)
        .collect::<Result<Vec<_>>>()?;
    let count = blocks.count();
    // Every block has as many targets as the others.
    let mean_nll = block_nll.iter().sum::<f64>() / count as f64;
    let score = BlockScore {
        block_tokens,
        blocks: count,
        targets: count * blocks.targets_per_block(),
        dropped_tokens: blocks.dropped_tokens(),
        mean_nll,
        perplexity: mean_nll.exp(),
        block_nll,
    };
    if args.json {
        return output::print_json(&score);
    }
    output::print(&format!(
        "tokens      {} ({count} blocks of {block_tokens}, {} dropped)\ntargets     {}\nmean nll    {mean_nll:.4}\n\
         perplexity  {:.4}\n",
        ids.len(),
        score.dropped_tokens,
        score.targets,
        score.perplexity
    ))
}

fn check_finite(mut numbers: impl Iterator<Item = f64>) -> Result<()> {
    ensure!(numbers.all(f64::is_finite), Error::NotFinite);
    Ok(())
}
