//! `wick compare`: the text that a model writes with every neuron beside the one it writes with those that a selector
//! chooses ("LLM in a flash", appendix G), and how sure both were where they part.

use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_wick_models::{
    likeliest, logprob, LoadedModel, Sampling, Stop, TextGenerator, WickTokenizer,
};
use clap::Args;
use serde::Serialize;

use crate::args::{positive, ModelArgs, OpenedModel};
use crate::columns::{side_by_side, Marked};
use crate::interrupt::{CtrlC, INTERRUPTED_STATUS};
use crate::prompt::PromptArgs;
use crate::selectors::{load_with, to_compare};
use crate::{demo, output};

/// Tokens to generate when nobody says.
const TOKENS_DEFAULT: usize = 64;

#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    prompt: PromptArgs,

    /// Tokens to generate at most, always the likeliest one
    #[arg(short = 'n', long = "tokens", value_name = "COUNT", default_value_t = TOKENS_DEFAULT, value_parser = positive)]
    tokens: usize,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Both texts.
#[derive(Serialize)]
struct Comparison {
    model: String,
    prompt_tokens: usize,
    dense: Written,
    sparse: Written,
    /// Tokens before the first difference.
    equal_tokens: usize,
    /// `None` where the texts are the same.
    difference: Option<Difference>,
}

/// One text.
#[derive(Serialize)]
struct Written {
    selector: &'static str,
    ids: Vec<u32>,
    text: Option<String>,
    stop: Stop,
    /// What each token adds to the text.
    #[serde(skip)]
    pieces: Vec<String>,
}

/// The first token that differs.
#[derive(Serialize)]
struct Difference {
    /// What dense, and what sparse goes on with.
    dense: Token,
    sparse: Token,
}

/// A token, and how likely both find it after the tokens that they share.
#[derive(Serialize)]
struct Token {
    id: u32,
    text: Option<String>,
    probability_dense: f64,
    probability_sparse: f64,
}

pub(crate) fn run(args: &CompareArgs) -> Result<ExitCode> {
    let ctrl_c = CtrlC::watch()?;
    let opened = args.model.open(ctrl_c.flag())?;
    let is_demo = args.model.is_demo();
    let prompt = args.prompt.read(is_demo.then_some(demo::PROMPT))?;
    let prompt = prompt.encode(&opened)?;
    opened.check_length(&prompt)?;
    let selectors = to_compare(&opened)?;
    let [_, sparse] = selectors[..] else {
        anyhow::bail!("dense is this model's selector, so there is nothing to compare; --selector names another");
    };
    if let Some(tuned) = opened.tuned_line() {
        output::note(&format!("tuned: {tuned}"));
    }
    ctrl_c.arm();
    let write = |model: &mut LoadedModel| write(&opened, model, &prompt, args.tokens);
    let dense_text = write(&mut load_with(&opened, selectors[0])?)?;
    let mut model = load_with(&opened, sparse)?;
    let sparse_text = write(&mut model)?;
    if [&dense_text, &sparse_text]
        .iter()
        .any(|text| text.stop == Stop::Interrupted)
    {
        output::complain("interrupted before both texts were written");
        return Ok(ExitCode::from(INTERRUPTED_STATUS));
    }
    let pairs = dense_text.ids.iter().zip(&sparse_text.ids);
    let equal_tokens = pairs.take_while(|(a, b)| a == b).count();
    let mut comparison = Comparison {
        model: opened.folder.path().display().to_string(),
        prompt_tokens: prompt.len(),
        difference: None,
        equal_tokens,
        dense: dense_text,
        sparse: sparse_text,
    };
    if comparison.dense.ids != comparison.sparse.ids {
        let equal = &comparison.dense.ids[..equal_tokens];
        let sparse_logits = logits_after(&mut model, &prompt, equal)?;
        drop(model);
        let mut dense = load_with(&opened, selectors[0])?;
        let dense_logits = logits_after(&mut dense, &prompt, equal)?;
        let difference = Difference::new(&opened, &dense_logits, &sparse_logits);
        comparison.difference = Some(difference?);
    }
    match args.json {
        true => output::print_json(&comparison)?,
        false => output::print(&comparison.to_text())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The logits where both texts were equal for the last time, got as they were when the texts were written: selectors may treat what
/// is written otherwise than a prompt.
fn logits_after(model: &mut LoadedModel, prompt: &[u32], written: &[u32]) -> Result<Vec<f32>> {
    model.reset();
    let mut logits = model.forward(prompt)?;
    for id in written {
        logits = model.forward(&[*id])?;
    }
    Ok(logits)
}

/// The likeliest tokens after `prompt`.
fn write(
    opened: &OpenedModel,
    model: &mut LoadedModel,
    prompt: &[u32],
    tokens_max: usize,
) -> Result<Written> {
    let selector = model.plan().selector.name();
    let mut generator = TextGenerator::new(model, &Sampling::default(), tokens_max);
    generator.prompt(prompt)?;
    let mut ids = Vec::new();
    while let Some(id) = generator.next_token()? {
        ids.push(id);
    }
    let stop = generator.stop().unwrap_or(Stop::Length);
    let tokenizer = opened.tokenizer.as_ref();
    let pieces = pieces(tokenizer, prompt, &ids)?;
    Ok(Written {
        selector,
        ids,
        text: tokenizer.map(|_| pieces.concat()),
        stop,
        pieces,
    })
}

/// What each of `ids` adds to the text after `prompt`; numbers where there is no tokenizer.
fn pieces(tokenizer: Option<&WickTokenizer>, prompt: &[u32], ids: &[u32]) -> Result<Vec<String>> {
    let Some(tokenizer) = tokenizer else {
        return Ok(ids.iter().map(|id| format!("{id} ")).collect());
    };
    let mut stream = tokenizer.stream(prompt);
    let mut pieces = Vec::with_capacity(ids.len());
    for &id in ids {
        pieces.push(stream.push(id)?);
    }
    let rest = stream.finish()?;
    if let Some(last) = pieces.last_mut() {
        last.push_str(&rest);
    }
    Ok(pieces)
}

impl Difference {
    /// From the logits of both after the tokens that they share.
    fn new(opened: &OpenedModel, dense: &[f32], sparse: &[f32]) -> Result<Self> {
        let token = |logits: &[f32]| -> Result<Token> {
            let id = likeliest(logits).context("a model without logits")?;
            let tokenizer = opened.tokenizer.as_ref();
            let text = tokenizer
                .map(|tokenizer| tokenizer.decode(&[id]))
                .transpose()?;
            Ok(Token {
                id,
                text,
                probability_dense: logprob(dense, id).exp(),
                probability_sparse: logprob(sparse, id).exp(),
            })
        };
        Ok(Self {
            dense: token(dense)?,
            sparse: token(sparse)?,
        })
    }
}

impl Comparison {
    fn to_text(&self) -> String {
        let marked = |text: &Written| {
            let at = self.equal_tokens.min(text.pieces.len());
            let (before, after) = text.pieces.split_at(at);
            let (differing, rest) = match after.split_first() {
                Some((first, rest)) => (first.clone(), rest.concat()),
                None => (String::new(), String::new()),
            };
            Marked {
                title: text.selector.to_owned(),
                before: before.concat(),
                marked: self.difference.as_ref().map(|_| differing),
                after: rest,
            }
        };
        let mut text = side_by_side(&marked(&self.dense), &marked(&self.sparse));
        let Some(Difference { dense, sparse }) = &self.difference else {
            let count = self.equal_tokens;
            return format!("{text}\nthe same {count} tokens\n");
        };
        text.push_str(&format!(
            "\n{} equal tokens, then the first difference, marked above:\n{:<24}{:>10}{:>10}\n",
            self.equal_tokens, "", self.dense.selector, self.sparse.selector
        ));
        for token in [dense, sparse] {
            text.push_str(&format!(
                "{:<24}{:>8.2} %{:>8.2} %\n",
                token.name(),
                100.0 * token.probability_dense,
                100.0 * token.probability_sparse
            ));
        }
        text
    }
}

impl Token {
    /// For people: the text in quotes, or the number of one without text, such as that which ends a text.
    fn name(&self) -> String {
        match &self.text {
            Some(text) if !text.is_empty() => format!("{text:?}"),
            _ => format!("token {}", self.id),
        }
    }
}
