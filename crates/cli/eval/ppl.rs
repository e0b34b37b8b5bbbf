//! `wick eval ppl`: perplexity of a text, with every neuron and with those that a selector chooses.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_wick_models::{block_nll, Blocks, ContinuationScore};
use clap::Args;
use serde::Serialize;

use super::results::{Results, Work};
use super::side::{ids_crc32c, is_interruption, settings, Question, Side, WorkReport};
use super::statistics::Estimate;
use crate::args::{positive, ModelArgs};
use crate::interrupt::{CtrlC, INTERRUPTED_STATUS};
use crate::output;
use crate::prompt::read_file;
use crate::selectors::{to_compare, tokenizer};

/// Its name in a file of results.
const TASK: &str = "ppl";

#[derive(Args, Debug)]
pub(super) struct PplArgs {
    /// `--ctx` is the length of a block
    #[command(flatten)]
    model: ModelArgs,

    /// Text to score: tokenised once, in blocks of the context's length that do not overlap; the tail is dropped
    #[arg(long, alias = "text", value_name = "FILE")]
    text_file: PathBuf,

    /// Score the first COUNT blocks alone
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    blocks: Option<usize>,

    /// Leave out the special tokens that the tokenizer adds to a text, such as a BOS
    #[arg(long)]
    no_bos: bool,

    /// Keep each block's score in FILE as it comes; a second start goes on from there
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Both perplexities.
#[derive(Serialize)]
struct PplReport {
    model: String,
    block_tokens: usize,
    blocks: usize,
    /// Tokens of a block that were predicted: all but its first.
    targets_per_block: usize,
    /// Tokens of the text that are in no block.
    dropped_tokens: usize,
    is_interrupted: bool,
    dense: PplSide,
    /// `None` where the selector is `dense` itself.
    sparse: Option<PplSide>,
    /// Perplexity of sparse over dense, on the blocks that both have.
    ratio: Option<f64>,
    /// Mean NLL of sparse minus that of dense, paired by block.
    nll_difference: Option<Estimate>,
}

/// One perplexity.
#[derive(Serialize)]
struct PplSide {
    selector: &'static str,
    /// Blocks that are done.
    blocks: usize,
    /// Mean negative log-probability of a target, natural logarithm; the error is that over blocks.
    nll: Option<Estimate>,
    perplexity: Option<f64>,
    /// The same mean within each block.
    block_nll: Vec<f64>,
    work: WorkReport,
}

pub(super) fn run(args: &PplArgs) -> Result<ExitCode> {
    let ctrl_c = CtrlC::watch()?;
    let text = read_file(&args.text_file)?;
    let opened = args.model.open(ctrl_c.flag())?;
    let tokenizer = tokenizer(&opened)?;
    let ids = match args.no_bos {
        true => tokenizer.encode_bare(&text)?,
        false => tokenizer.encode(&text)?,
    };
    drop(text);
    let settings = settings(&opened, !args.no_bos, args.results.as_deref())?;
    let blocks = Blocks::cut(&ids, settings.ctx, args.blocks.unwrap_or(usize::MAX));
    let blocks = blocks.with_context(|| args.text_file.display().to_string())?;
    let selectors = to_compare(&opened)?;
    let mut results = Results::open(args.results.as_deref(), &settings)?;
    if let Some(tuned) = opened.tuned_line() {
        output::note(&format!("tuned: {tuned}"));
    }
    ctrl_c.arm();
    let bar = output::progress_bar(output::COUNT_BAR, false);
    bar.set_length((selectors.len() * blocks.count()) as u64);
    let mut sides = Vec::new();
    for &selector in &selectors {
        bar.set_message(format!("blocks, {selector}"));
        let side = Side::new(&opened, selector);
        sides.push(PplSide::run(side, &blocks, &mut results, &|| bar.inc(1))?);
    }
    bar.finish_and_clear();
    let model = opened.folder.path().display().to_string();
    let report = PplReport::new(model, &blocks, sides);
    match args.json {
        true => output::print_json(&report)?,
        false => output::print(&report.to_text())?,
    }
    Ok(match report.is_interrupted {
        true => ExitCode::from(INTERRUPTED_STATUS),
        false => ExitCode::SUCCESS,
    })
}

impl PplSide {
    /// Scores all blocks, or those until somebody interrupts.
    fn run(
        mut side: Side<'_>,
        blocks: &Blocks<'_>,
        results: &mut Results,
        on_block: &dyn Fn(),
    ) -> Result<Self> {
        let (mut nll, mut work) = (Vec::new(), Work::default());
        for (index, block) in blocks.iter().enumerate() {
            let question = Question {
                task: TASK,
                doc: index as u64,
                ids_crc32c: ids_crc32c([(block, 1)].into_iter()),
                choices: 1,
                cut_tokens: 0,
            };
            let answer = side.answer(question, results, |model| {
                let logprob = -block_nll(model, block)?;
                // Nobody asks of a block whether greedy decoding would write it.
                let is_greedy = false;
                Ok(vec![ContinuationScore { logprob, is_greedy }])
            });
            match answer {
                Ok(record) => {
                    let sum: f64 = record.logprobs.iter().sum();
                    nll.push(-sum / blocks.targets_per_block() as f64);
                    work += record.work;
                }
                Err(error) if is_interruption(&error) => break,
                Err(error) => return Err(error),
            }
            on_block();
        }
        let estimate = Estimate::of(&nll);
        Ok(Self {
            selector: side.selector().name(),
            blocks: nll.len(),
            nll: estimate,
            // Every block has as many targets as the others.
            perplexity: estimate.map(|nll| nll.mean.exp()),
            block_nll: nll,
            work: WorkReport::of(work),
        })
    }
}

impl PplSide {
    fn to_line(&self) -> String {
        let perplexity = self
            .perplexity
            .map_or("-".to_owned(), |value| format!("{value:.4}"));
        let nll = self.nll.map_or("-".to_owned(), |nll| nll.to_text(4));
        format!(
            "{:<12}{perplexity:>12}  {nll}   {}",
            self.selector,
            self.work.to_text()
        )
    }
}

impl PplReport {
    /// Of one side or two, dense first.
    fn new(model: String, blocks: &Blocks<'_>, sides: Vec<PplSide>) -> Self {
        let is_interrupted = sides.iter().any(|side| side.blocks < blocks.count());
        let mut sides = sides.into_iter();
        let dense = sides.next().expect("dense is always among the selectors");
        let sparse = sides.next();
        let nll_difference = sparse
            .as_ref()
            .and_then(|sparse| Estimate::of_difference(&dense.block_nll, &sparse.block_nll));
        Self {
            model,
            block_tokens: blocks.block_tokens(),
            blocks: blocks.count(),
            targets_per_block: blocks.targets_per_block(),
            dropped_tokens: blocks.dropped_tokens(),
            is_interrupted,
            ratio: nll_difference.map(|difference| difference.mean.exp()),
            nll_difference,
            dense,
            sparse,
        }
    }

    fn to_text(&self) -> String {
        let mut lines = vec![format!(
            "{}: {} blocks of {} tokens, {} targets, {} tokens dropped",
            self.model,
            self.blocks,
            self.block_tokens,
            self.blocks * self.targets_per_block,
            self.dropped_tokens
        )];
        lines.push(format!("{:<12}{:>12}  mean nll", "", "perplexity"));
        for side in [Some(&self.dense), self.sparse.as_ref()]
            .into_iter()
            .flatten()
        {
            lines.push(side.to_line());
            if side.blocks < self.blocks {
                lines.push(format!(
                    "{:<12}interrupted after {} blocks",
                    "", side.blocks
                ));
            }
        }
        if let (Some(ratio), Some(difference)) = (self.ratio, self.nll_difference) {
            // An error of the logarithm is one of the ratio in parts.
            let stderr = difference.stderr.map(|stderr| stderr * ratio);
            let ratio = Estimate {
                mean: ratio,
                stderr,
            };
            lines.push(format!("{:<12}{:>12}", "ratio", ratio.to_text(4)));
            lines.push(format!("{:<12}{}", "difference", difference.to_text(5)));
        }
        lines.join("\n") + "\n"
    }
}
