//! `wick bench density`: what each density of dip, and of what it is measured against, loses and saves.
//!
//! For each selector, density, gamma and budget: the perplexity of a text, and then what decoding the same tokens takes, one by
//! one, after some to warm up, from empty caches. Perplexities that do not depend on the budget are computed once: all but those of
//! `dip-ca`, which goes by what is in memory, and `cats`, whose thresholds are those of a step's tokens, which the budget counts.
//!
//! A model with random weights has no perplexity worth having: it decodes ids that follow no pattern.
//!
//! Not here: the table and its picture (`density_table`), a device that is not there (`simulated`).

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{ensure, Context, Result};
use candle_wick::{DipOptions, HumanBytes, Memory, SelectorKind};
use candle_wick_models::{block_nll, Blocks, LoadOptions, LoadedModel};
use clap::Args;

use super::decode::describe;
use super::density_table::{Frontier, Point};
use super::subject::{Subject, SubjectArgs};
use crate::args::{count, positive, share};
use crate::dip::gamma;
use crate::interrupt::{CtrlC, INTERRUPTED_STATUS};
use crate::machine::Machine;
use crate::output;
use crate::pass::pass;
use crate::prompt::read_file;

/// Of a block, where nobody asks for another length.
const CTX_DEFAULT: usize = 512;

#[derive(Args, Debug)]
pub(crate) struct DensityArgs {
    #[command(flatten)]
    subject: SubjectArgs,

    /// Selectors to try, beside dense, with commas between them
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [SelectorKind::Dip, SelectorKind::DipCa])]
    selectors: Vec<SelectorKind>,

    /// Shares of the FFN weights that a token is multiplied with, with commas between them
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = share, default_values_t = [0.8, 0.65, 0.5, 0.35])]
    density: Vec<f64>,

    /// For dip-ca, whose texts go token by token: factors of a value whose column is not in memory
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = gamma, default_values_t = [0.2])]
    gamma: Vec<f64>,

    /// Budgets
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "50%"
    )]
    memory: Vec<Memory>,

    /// Text to score and to decode; none for random weights
    #[arg(long, alias = "text", value_name = "FILE")]
    text_file: Option<PathBuf>,

    /// Tokens of a block, each a text of its own [default: 512, or the model's longest]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    ctx: Option<usize>,

    /// Score the first COUNT blocks
    #[arg(long, value_name = "COUNT", value_parser = positive, default_value_t = 16)]
    blocks: usize,

    /// Leave out the special tokens that the tokenizer adds to a text, such as a BOS
    #[arg(long)]
    no_bos: bool,

    /// Tokens decoded and measured for each point
    #[arg(long, value_name = "COUNT", value_parser = positive, default_value_t = 64)]
    tokens: usize,

    /// Tokens decoded before those
    #[arg(long, value_name = "COUNT", value_parser = count, default_value_t = 64)]
    warmup: usize,

    /// Name the fastest point that loses at most so much perplexity
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "1%")]
    max_ppl_loss: f64,

    /// Folder for the picture, SVG and PNG
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What is measured once.
#[derive(Clone, Copy)]
struct Setting {
    selector: SelectorKind,
    dip: DipOptions,
    memory: Memory,
}

/// What all points share.
struct Bench<'a> {
    args: &'a DensityArgs,
    subject: Subject,
    ctx: usize,
    /// Of the text; ids that follow no pattern where there is none.
    ids: Vec<u32>,
    /// Mean negative log-probabilities that do not depend on the budget.
    known_nll: BTreeMap<String, f64>,
}

pub(crate) fn run(args: &DensityArgs) -> Result<ExitCode> {
    let ctrl_c = CtrlC::watch()?;
    if let Some(out) = &args.out {
        fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    }
    let subject = Subject::open(&args.subject)?;
    let ctx = match args.ctx {
        Some(ctx) => ctx,
        None => subject.ctx_up_to(CTX_DEFAULT)?,
    };
    let mut bench = Bench {
        ids: ids(args, &subject, ctx)?,
        ctx,
        args,
        subject,
        known_nll: BTreeMap::new(),
    };
    let settings = bench.possible(args.settings())?;
    ctrl_c.arm();
    let is_stopped = || ctrl_c.flag().is_triggered();
    let mut points = Vec::new();
    for (index, setting) in settings.iter().enumerate() {
        if is_stopped() {
            break;
        }
        let point = bench.measure(setting)?;
        output::note(&format!("{} of {}: {point}", index + 1, settings.len()));
        points.push(point);
    }
    if points.is_empty() {
        return Ok(ExitCode::from(INTERRUPTED_STATUS));
    }
    let frontier = bench.sum_up(points, is_stopped());
    match args.json {
        true => output::print_json(&frontier)?,
        false => output::print(&frontier.to_string())?,
    }
    if let Some(out) = &args.out {
        frontier
            .figure()
            .write(out, &format!("density-{}", frontier.name))?;
    }
    Ok(match is_stopped() {
        true => ExitCode::from(INTERRUPTED_STATUS),
        false => ExitCode::SUCCESS,
    })
}

/// The text's ids, or as many as there are to decode.
fn ids(args: &DensityArgs, subject: &Subject, ctx: usize) -> Result<Vec<u32>> {
    let decoded = args.warmup + args.tokens;
    ensure!(
        decoded <= ctx,
        "{decoded} tokens to decode do not fit into a context of {}",
        ctx
    );
    let Some(path) = &args.text_file else {
        ensure!(
            subject.synthetic.is_some(),
            "a real model loses something of a text: --text-file FILE"
        );
        // Below any vocabulary's size.
        return Ok((3..1003).cycle().step_by(7).take(decoded).collect());
    };
    let tokenizer = subject.tokenizer()?;
    let text = read_file(path)?;
    let ids = match args.no_bos {
        true => tokenizer.encode_bare(&text)?,
        false => tokenizer.encode(&text)?,
    };
    ensure!(
        ids.len() >= ctx,
        "{} has {} tokens, fewer than a block of {}",
        path.display(),
        ids.len(),
        ctx
    );
    Ok(ids)
}

impl DensityArgs {
    /// All of them; dense first at each budget.
    fn settings(&self) -> Vec<Setting> {
        let mut settings = Vec::new();
        for &memory in &self.memory {
            let mut push = |selector, density, gamma| {
                let dip = DipOptions {
                    density,
                    gamma,
                    dense_prompt: false,
                };
                settings.push(Setting {
                    selector,
                    dip,
                    memory,
                });
            };
            let gamma = DipOptions::default().gamma;
            push(SelectorKind::Dense, 1.0, gamma);
            let sparse = self.selectors.iter().copied();
            for selector in sparse.filter(|selector| *selector != SelectorKind::Dense) {
                for &density in self.densities(selector) {
                    match selector {
                        SelectorKind::DipCa => {
                            self.gamma
                                .iter()
                                .for_each(|gamma| push(selector, density, *gamma));
                        }
                        _ => push(selector, density, gamma),
                    }
                }
            }
        }
        settings
    }

    /// One is enough for what takes no density.
    fn densities(&self, selector: SelectorKind) -> &[f64] {
        match selector.has_density() {
            true => &self.density,
            false => &[1.0],
        }
    }
}

impl Setting {
    fn name(&self) -> String {
        let DipOptions { density, gamma, .. } = self.dip;
        match self.selector {
            SelectorKind::DipCa => format!("{} {density}, gamma {gamma}", self.selector),
            selector if selector.has_density() => format!("{selector} {density}"),
            selector => selector.to_string(),
        }
    }
}

impl Bench<'_> {
    fn options(&self, setting: &Setting) -> LoadOptions {
        LoadOptions {
            selector: Some(setting.selector),
            dip: setting.dip,
            ..self.subject.options(setting.memory, self.ctx)
        }
    }

    /// Those of `settings` that can be: what cannot is told before anything is measured.
    fn possible(&self, mut settings: Vec<Setting>) -> Result<Vec<Setting>> {
        settings.retain(|setting| {
            let plan = candle_wick_models::plan(&self.subject.folder, &self.options(setting));
            if let Err(error) = &plan {
                let (name, memory) = (setting.name(), describe(setting.memory));
                output::note(&format!("{name}, {memory}: left out: {error}"));
            }
            plan.is_ok()
        });
        ensure!(!settings.is_empty(), "nothing of this can be measured");
        Ok(settings)
    }

    fn measure(&mut self, setting: &Setting) -> Result<Point> {
        let nll = self.nll(setting)?;
        // Another one than the text went through, whose caches would be warm in some rows alone.
        let mut model = self.load(setting)?;
        let (mut figures, mut ffn) = (Vec::new(), candle_wick::FfnStats::default());
        let decoded = &self.ids[..self.args.warmup + self.args.tokens];
        for (index, id) in decoded.iter().enumerate() {
            let (pass, _) = pass(&mut model, &[*id])?;
            if index >= self.args.warmup {
                figures.push(pass.figures);
                ffn += pass.ffn;
            }
        }
        let (name, memory) = (setting.name(), describe(setting.memory));
        // There is little room beside a picture.
        let budget = match setting.memory {
            Memory::Bytes(bytes) => HumanBytes(bytes).to_string(),
            percent => percent.to_string(),
        };
        let series = match setting.selector {
            SelectorKind::DipCa => format!("dip-ca {}, {budget}", setting.dip.gamma),
            selector => format!("{selector}, {budget}"),
        };
        let names = [name, series, memory];
        Ok(Point::new(names, nll, &figures, &ffn, &model))
    }

    fn load(&self, setting: &Setting) -> Result<LoadedModel> {
        let folder = self.subject.folder.clone();
        Ok(LoadedModel::load(folder, &self.options(setting))?)
    }

    /// Mean negative log-probability of the text's targets.
    fn nll(&mut self, setting: &Setting) -> Result<Option<f64>> {
        if self.args.text_file.is_none() {
            return Ok(None);
        }
        let name = setting.name();
        // The thresholds of cats are those of the first tokens that a model sees: let them be the text's.
        let depends_on_memory =
            matches!(setting.selector, SelectorKind::DipCa | SelectorKind::Cats);
        if let (false, Some(nll)) = (depends_on_memory, self.known_nll.get(&name)) {
            return Ok(Some(*nll));
        }
        let mut model = self.load(setting)?;
        let blocks = Blocks::cut(&self.ids, self.ctx, self.args.blocks)?;
        let mut sum = 0.0;
        for block in blocks.iter() {
            sum += block_nll(&mut model, block)?;
        }
        let nll = sum / (blocks.count() * blocks.targets_per_block()) as f64;
        if !depends_on_memory {
            self.known_nll.insert(name, nll);
        }
        Ok(Some(nll))
    }

    fn sum_up(&self, points: Vec<Point>, is_interrupted: bool) -> Frontier {
        let folder = &self.subject.folder;
        let path = folder.path();
        let mut frontier = Frontier {
            name: path
                .file_stem()
                .map_or("model".into(), |stem| stem.to_string_lossy().into_owned()),
            model: path.display().to_string(),
            synthetic: self.subject.synthetic.clone(),
            text: self
                .args
                .text_file
                .as_ref()
                .map(|path| path.display().to_string()),
            // A short text has fewer.
            blocks: self.args.blocks.min(self.ids.len() / self.ctx),
            block_tokens: self.ctx,
            tokens: self.args.tokens,
            warmup_tokens: self.args.warmup,
            cache_policy: self.args.subject.cache_policy.name(),
            reads: format!("{}, {}", folder.io_mode(), folder.io_engine()),
            machine: Machine::this(),
            max_ppl_loss: self.args.max_ppl_loss,
            is_interrupted,
            points,
            best: None,
        };
        frontier.judge();
        frontier
    }
}
