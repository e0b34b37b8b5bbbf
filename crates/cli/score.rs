//! `wick score`: how likely a model finds a text.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{ensure, Result};
use candle_wick_models::{score, Interrupt, LoadedModel};
use clap::Args;

use crate::args::{ModelArgs, TokenIds};
use crate::output;
use crate::prompt::{read_file, Prompt};

#[derive(Args, Debug)]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    text: TextArgs,

    /// Print one JSON object: ids, logprobs, last_logits
    #[arg(long)]
    json: bool,
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

pub(crate) fn run(args: &ScoreArgs) -> Result<ExitCode> {
    let opened = args.model.open(Interrupt::new())?;
    let ids = args.text.read()?.encode(&opened)?;
    opened.check_length(&ids)?;
    let mut model = LoadedModel::load(opened.folder, &opened.options)?;
    let score = score(&mut model, &ids)?;
    let is_finite = score.last_logits.iter().all(|logit| logit.is_finite())
        && score.logprobs.iter().all(|logprob| logprob.is_finite());
    ensure!(
        is_finite,
        "the model's logits are not finite: its weights are damaged, or overflow"
    );
    if args.json {
        output::print_json(&score)?;
        return Ok(ExitCode::SUCCESS);
    }
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
    output::print(&format!(
        "tokens      {}\nmean nll    {}\nperplexity  {}\n",
        score.ids.len(),
        number(score.mean_nll()),
        number(score.perplexity())
    ))?;
    Ok(ExitCode::SUCCESS)
}
