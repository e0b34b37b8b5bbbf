//! `wick bench sweep`: what a token takes along one axis, everything else alike.
//!
//! | axis | settings | what should be seen |
//! |---|---|---|
//! | memory | budgets from the floor to all of the model | no budget slower than a smaller one, each made use of |
//! | length | blocks of a long text, greedy and nucleus | neither bytes nor time grow after the first block |
//! | window | how many tokens keep a neuron | where keeping more stops to help |
//!
//! Each setting is a row of `bench decode` with every part on, in a process of its own inside a memory cgroup of its
//! budget. Rounds go through the settings there and back, so that a machine whose pace drifts disturbs all alike; what
//! is compared are medians over the tokens of all rounds.
//!
//! Models with random weights replay a trace: what they write would decide nothing, so there is one text, not two.
//!
//! Not here: the table, its judgements and its pictures (`sweep_table`), and how a setting is measured (`row`).

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{bail, ensure, Context, Result};
use candle_wick::{BudgetPlan, Memory, SelectorKind};
use candle_wick_models::WickTokenizer;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::cgroup::MemoryCgroup;
use super::decode::{describe, CTX_DEFAULT, PROCESS_SLACK_BYTES};
use super::row::{RowFigures, RowSpec, TextSpec};
use super::subject::{Subject, SubjectArgs};
use super::sweep_table::{Measurement, Sweep};
use crate::args::{count, positive};
use crate::interrupt::{CtrlC, INTERRUPTED_STATUS};
use crate::machine::Machine;
use crate::probe::Rates;
use crate::spread::Spread;
use crate::{demo, output};

const WINDOWS: [Option<usize>; 8] = [
    Some(1),
    Some(2),
    Some(3),
    Some(4),
    Some(5),
    Some(8),
    Some(16),
    None,
];
const MEMORY_DEFAULT: Memory = Memory::Percent(50.0);
/// Tokens of a setting and round, and of a text.
const TOKENS_DEFAULT: usize = 20;
const LENGTH_DEFAULT: usize = 1000;
const ROUNDS_DEFAULT: usize = 2;
/// More budgets than a picture can show.
const POINTS_MAX: usize = 100;
/// Of nucleus sampling, at temperature 1.
pub(super) const TOP_P: f64 = 0.9;

#[derive(Args, Debug)]
pub(crate) struct SweepArgs {
    #[command(flatten)]
    subject: SubjectArgs,

    /// What to vary
    #[arg(long, value_name = "AXIS")]
    over: Axis,

    /// Values to try: budgets such as 400MiB,60%, or windows in tokens such as 2,5,none [default: budgets from the
    /// smallest that works to all of the model; windows 1,2,3,4,5,8,16,none]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    at: Vec<String>,

    /// Number of budgets from the smallest to all of the model [default: 10]
    #[arg(long, value_name = "COUNT", value_parser = points, conflicts_with = "at")]
    points: Option<usize>,

    /// Budget, where that is not what varies [default: 50%]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,

    /// Positions of the KV cache [default: 384, over length all of the text; or the model's longest]
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<usize>,

    /// Tokens measured for a setting in each round [default: 20, over length 1000]
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    tokens: Option<usize>,

    /// Tokens before those: a cache that is not full yet still reads what it will keep [default: half as many, over
    /// length 0]
    #[arg(long, value_name = "COUNT", value_parser = count)]
    warmup: Option<usize>,

    /// Rounds through all settings, there and back [default: 2; over length 1]
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    rounds: Option<usize>,

    /// Over length: tokens of a block
    #[arg(long, value_name = "COUNT", value_parser = positive, default_value_t = 50)]
    block: usize,

    /// Folder for the pictures, SVG and PNG
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What varies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Axis {
    Memory,
    Length,
    Window,
}

fn points(text: &str) -> Result<usize, String> {
    match positive(text)? {
        1 => Err("must be at least 2".to_owned()),
        count if count > POINTS_MAX => Err(format!("must be at most {POINTS_MAX}")),
        count => Ok(count),
    }
}

/// What to measure, and by what name and number it goes.
struct Setting {
    name: String,
    value: f64,
    spec: RowSpec,
}

/// What all settings share.
struct Bench<'a> {
    args: &'a SweepArgs,
    subject: Subject,
    ctx: usize,
    tokens: usize,
    warmup_tokens: usize,
    rounds: usize,
}

pub(crate) fn run(args: &SweepArgs) -> Result<ExitCode> {
    args.check()?;
    let ctrl_c = CtrlC::watch()?;
    if let Some(out) = &args.out {
        fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    }
    let subject = Subject::open(&args.subject)?;
    let is_length = args.over == Axis::Length;
    let default = |length, others| if is_length { length } else { others };
    let tokens = args
        .tokens
        .unwrap_or(default(LENGTH_DEFAULT, TOKENS_DEFAULT));
    let prompt = if is_length {
        prompt(&subject)?
    } else {
        Vec::new()
    };
    let bench = Bench {
        args,
        ctx: match args.ctx {
            Some(ctx) => ctx,
            None => subject.ctx_up_to(default(tokens + prompt.len(), CTX_DEFAULT))?,
        },
        tokens,
        warmup_tokens: args.warmup.unwrap_or(default(0, tokens.div_ceil(2))),
        rounds: args.rounds.unwrap_or(default(1, ROUNDS_DEFAULT)),
        subject,
    };
    ensure!(
        prompt.len() < bench.ctx,
        "a context of {} has no room after a prompt of {} tokens",
        bench.ctx,
        prompt.len()
    );
    let settings = bench.settings(prompt)?;
    let mut rates = bench.subject.rates()?;
    ctrl_c.arm();
    let is_stopped = || ctrl_c.flag().is_triggered();
    let (measured, failures) = bench.measure(&settings, &is_stopped)?;
    if measured.is_empty() && is_stopped() {
        return Ok(ExitCode::from(INTERRUPTED_STATUS));
    }
    ensure!(!measured.is_empty(), "nothing could be measured");
    if !is_stopped() {
        rates.keep_best(bench.subject.rates()?);
    }
    let sweep = bench.sum_up(measured, is_stopped(), &rates)?;
    match args.json {
        true => output::print_json(&sweep)?,
        false => output::print(&sweep.to_string())?,
    }
    if let Some(out) = &args.out {
        let name = format!("sweep-{}-{}", sweep.over.name(), sweep.name);
        sweep.figure().write(out, &name)?;
    }
    Ok(match (is_stopped(), failures) {
        (true, _) => ExitCode::from(INTERRUPTED_STATUS),
        (false, 0) => ExitCode::SUCCESS,
        (false, _) => ExitCode::FAILURE,
    })
}

/// Ids of the text that the model is to write on from; none where a trace decides.
fn prompt(subject: &Subject) -> Result<Vec<u32>> {
    if subject.synthetic.is_some() {
        return Ok(Vec::new());
    }
    match WickTokenizer::load(subject.folder.path())? {
        Some(tokenizer) => Ok(tokenizer.encode(demo::PROMPT)?),
        None => {
            output::note("no tokenizer in this folder: the text starts from id 0");
            Ok(vec![0])
        }
    }
}

impl Axis {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Length => "length",
            Self::Window => "window",
        }
    }
}

impl SweepArgs {
    /// Refuses flags that the axis has no use for.
    fn check(&self) -> Result<()> {
        let over = self.over;
        for (is_given, flag, needs) in [
            (self.memory.is_some(), "--memory", over != Axis::Memory),
            (self.points.is_some(), "--points", over == Axis::Memory),
            (!self.at.is_empty(), "--at", over != Axis::Length),
        ] {
            ensure!(
                !is_given || needs,
                "{flag} has no meaning for a sweep over {}",
                over.name()
            );
        }
        Ok(())
    }

    /// The windows asked for.
    fn windows(&self) -> Result<Vec<Option<usize>>> {
        if self.at.is_empty() {
            return Ok(WINDOWS.to_vec());
        }
        let window = |text: &String| match text.as_str() {
            "none" => Ok(None),
            text => match positive(text) {
                Ok(tokens) => Ok(Some(tokens)),
                Err(reason) => bail!("--at {text}: {reason}, nor \"none\""),
            },
        };
        self.at.iter().map(window).collect()
    }
}

impl Bench<'_> {
    fn plan(&self, memory: Memory) -> Result<BudgetPlan> {
        self.subject.plan(memory, self.ctx)
    }

    fn spec(&self, memory: Memory) -> Result<RowSpec> {
        Ok(RowSpec {
            warmup_tokens: self.warmup_tokens,
            tokens: self.tokens,
            ..self.subject.spec(&self.subject.options(memory, self.ctx))?
        })
    }

    fn settings(&self, prompt: Vec<u32>) -> Result<Vec<Setting>> {
        match self.args.over {
            Axis::Memory => self.budgets(),
            Axis::Length => self.texts(prompt),
            Axis::Window => self.windows(),
        }
    }

    /// Budgets in bytes, from small to large.
    fn budgets(&self) -> Result<Vec<Setting>> {
        let full = self.plan(Memory::Percent(100.0))?;
        // Another process' floor differs a little.
        let (least, most) = (
            full.floor_bytes + PROCESS_SLACK_BYTES,
            full.total_bytes + PROCESS_SLACK_BYTES,
        );
        let count = self.args.points.unwrap_or(10) as u64;
        let spread = |index| least + (most - least) * index / (count - 1);
        let mut budgets: Vec<u64> = if self.args.at.is_empty() {
            (0..count).map(spread).collect()
        } else {
            let bytes = |text: &String| match text.parse()? {
                Memory::Bytes(bytes) => Ok(bytes),
                percent => Ok(self.plan(percent)?.total_bytes + PROCESS_SLACK_BYTES),
            };
            self.args.at.iter().map(bytes).collect::<Result<_>>()?
        };
        budgets.sort_unstable();
        let setting = |bytes: u64| {
            Ok(Setting {
                name: format!("{:.0} MB", bytes as f64 / 1e6),
                value: bytes as f64,
                spec: self.spec(Memory::Bytes(bytes))?,
            })
        };
        budgets.into_iter().map(setting).collect()
    }

    /// Texts as long as the sweep: what varies is the place in them.
    fn texts(&self, prompt: Vec<u32>) -> Result<Vec<Setting>> {
        let memory = self.args.memory.unwrap_or(MEMORY_DEFAULT);
        let text = |name: &str, text: Option<TextSpec>| {
            Ok(Setting {
                name: name.to_owned(),
                value: 0.0,
                spec: RowSpec {
                    text,
                    ..self.spec(memory)?
                },
            })
        };
        if self.subject.synthetic.is_some() {
            return Ok(vec![text("replayed trace", None)?]);
        }
        [("greedy", None), ("nucleus", Some(TOP_P))]
            .into_iter()
            .map(|(name, top_p)| {
                let prompt = prompt.clone();
                text(name, Some(TextSpec { prompt, top_p }))
            })
            .collect()
    }

    fn windows(&self) -> Result<Vec<Setting>> {
        let spec = self.spec(self.args.memory.unwrap_or(MEMORY_DEFAULT))?;
        ensure!(
            spec.selector != SelectorKind::Dense.name(),
            "no predictors in this folder: every neuron is used for every token, whatever the window"
        );
        let windows = self.args.windows()?;
        let widest = windows.iter().flatten().max().copied().unwrap_or(1);
        let setting = |window: Option<usize>| Setting {
            name: window.map_or("none".to_owned(), |tokens| tokens.to_string()),
            // Keeping as long as there is room comes after all others.
            value: window.unwrap_or(2 * widest) as f64,
            spec: RowSpec {
                window_tokens: window,
                ..spec.clone()
            },
        };
        Ok(windows.into_iter().map(setting).collect())
    }

    /// All rounds, and how many of them failed; a setting that fails does not take the others with it.
    fn measure(
        &self,
        settings: &[Setting],
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<(Vec<Measurement>, usize)> {
        let mut measured: Vec<Measurement> = settings.iter().map(Setting::unmeasured).collect();
        let mut failures = 0;
        let steps = settings.len() * self.rounds;
        for step in 0..steps {
            let (round, place) = (step / settings.len(), step % settings.len());
            let index = match round % 2 {
                0 => place,
                _ => settings.len() - 1 - place,
            };
            let setting = &settings[index];
            if is_stopped() {
                break;
            }
            let cgroup = MemoryCgroup::new(setting.spec.limit_bytes);
            let outcome = setting.spec.in_own_process(cgroup.as_ref());
            let said = match outcome {
                Ok(figures) => {
                    let said = format!("{:.1} ms a token", median_ms(&figures));
                    measured[index].push(figures, cgroup.is_some());
                    said
                }
                // The process got the same Ctrl-C.
                Err(_) if is_stopped() => break,
                Err(error) => {
                    failures += 1;
                    output::one_line(&error)
                }
            };
            output::note(&format!(
                "{} of {steps}: {}: {said}",
                step + 1,
                setting.name
            ));
        }
        measured.retain(|setting| !setting.rounds.is_empty());
        Ok((measured, failures))
    }

    fn sum_up(
        &self,
        measured: Vec<Measurement>,
        is_interrupted: bool,
        rates: &Rates,
    ) -> Result<Sweep> {
        let full = self.plan(Memory::Percent(100.0))?;
        let is_memory = self.args.over == Axis::Memory;
        let memory = self.args.memory.unwrap_or(MEMORY_DEFAULT);
        let mut sweep = Sweep {
            name: self.name(),
            model: self.subject.folder.path().display().to_string(),
            synthetic: self.subject.synthetic.clone(),
            activity: self.subject.activity.map(|activity| activity.source),
            over: self.args.over,
            selector: full.selector.name(),
            memory: (!is_memory).then(|| describe(memory)),
            cache_policy: self.args.subject.cache_policy.name(),
            ctx: self.ctx,
            tokens: self.tokens,
            warmup_tokens: self.warmup_tokens,
            rounds: self.rounds,
            is_interrupted,
            machine: Machine::this(),
            rates: *rates,
            dense_weight_bytes: full.dense_weight_bytes,
            full_weight_bytes: full.weight_bytes,
            points: Vec::new(),
            checks: Vec::new(),
        };
        let block = (self.args.over == Axis::Length).then_some(self.args.block);
        sweep.fill(&measured, block);
        Ok(sweep)
    }

    /// What the model is called in titles and names of files.
    fn name(&self) -> String {
        let folder = self.subject.folder.path().file_name();
        match (&self.subject.synthetic, self.args.subject.folder.is_demo()) {
            // Part of a file name, and from a stranger's config.
            (Some(name), _) => name.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-"),
            (None, true) => "demo".to_owned(),
            (None, false) => {
                folder.map_or("model".into(), |name| name.to_string_lossy().into_owned())
            }
        }
    }
}

impl Setting {
    fn unmeasured(&self) -> Measurement {
        Measurement {
            name: self.name.clone(),
            value: self.value,
            rounds: Vec::new(),
            in_cgroup: true,
        }
    }
}

fn median_ms(figures: &RowFigures) -> f64 {
    Spread::of(figures.tokens.iter().map(|token| token.total_ms)).median
}
