//! One row of `bench decode`: a model loaded in one way, and what its tokens take, in a process of its own, so that
//! its peak is its own and a cgroup can bound it. What to measure goes to its stdin, for a long prompt has more ids than
//! an argument may have bytes; the figures come from its stdout.
//!
//! Not here: what is measured of a token (`pass`).

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Output, Stdio};

use anyhow::{bail, Context, Result};
use candle_wick::{
    peak_rss_bytes, CachePolicy, DipOptions, DirectIo, Engine, FlashFolder, IoOptions, Lookahead,
    Memory, SelectorKind, Switches, TraceFigures,
};
use candle_wick_models::{LoadOptions, LoadedModel, Sampler, Sampling};
#[cfg(target_os = "linux")]
use rustix::process::{set_parent_process_death_signal, Signal};
use serde::{Deserialize, Serialize};

use super::cgroup::MemoryCgroup;
use crate::output;
use crate::pass::pass;
pub(crate) use crate::pass::TokenFigures;
use crate::synthetic::made_up;

/// Seed of the tokens.
const SEED: u64 = 5;

/// What to load, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RowSpec {
    pub(crate) folder: PathBuf,
    pub(crate) predictors: Option<PathBuf>,
    /// What the plan may spend, before `slots_per_layer` changes it.
    pub(crate) memory: String,
    /// What the plan then comes to: the most that the process may use.
    pub(crate) limit_bytes: u64,
    pub(crate) selector: String,
    /// What `dip` and `dip-ca` keep.
    pub(crate) density: f64,
    pub(crate) gamma: f64,
    pub(crate) cache_policy: String,
    pub(crate) window_tokens: Option<usize>,
    pub(crate) slots_per_layer: Option<usize>,
    pub(crate) overlap: bool,
    pub(crate) bundling: bool,
    pub(crate) lookahead: bool,
    pub(crate) ctx: usize,
    pub(crate) in_flight: usize,
    pub(crate) engine: String,
    pub(crate) gap_bytes: usize,
    pub(crate) direct: String,
    /// Replay a trace in place of what the predictors choose.
    pub(crate) activity: Option<TraceFigures>,
    /// Share of a token's neurons that guesses name, where a trace is replayed.
    pub(crate) guessed: f64,
    /// What to write; `None` feeds ids that follow no pattern.
    pub(crate) text: Option<TextSpec>,
    pub(crate) warmup_tokens: usize,
    pub(crate) tokens: usize,
}

/// A text that the model writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TextSpec {
    pub(crate) prompt: Vec<u32>,
    /// Sample from the fewest tokens whose probabilities reach this sum; `None` takes the likeliest.
    pub(crate) top_p: Option<f64>,
}

/// What a row came to; lists have one entry a token.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RowFigures {
    /// Weights in DRAM.
    pub(crate) dram_bytes: u64,
    pub(crate) budget_bytes: Option<u64>,
    pub(crate) peak_bytes: Option<u64>,
    /// How files were really read, such as `direct, pool`.
    pub(crate) reads: Option<String>,
    /// What the text's prompt took, all of it.
    pub(crate) prompt: Option<TokenFigures>,
    pub(crate) tokens: Vec<TokenFigures>,
}

impl RowFigures {
    /// Weights in DRAM, computed by somebody else.
    pub(crate) fn in_dram(bytes: u64, times_ms: &[f64]) -> Self {
        let token = |total_ms: &f64| TokenFigures {
            total_ms: *total_ms,
            touched_bytes: bytes as f64,
            selected: 1.0,
            ..TokenFigures::default()
        };
        Self {
            dram_bytes: bytes,
            budget_bytes: None,
            peak_bytes: None,
            reads: None,
            prompt: None,
            tokens: times_ms.iter().map(token).collect(),
        }
    }
}

impl RowSpec {
    fn options(&self, folder: &FlashFolder) -> Result<LoadOptions> {
        let trace =
            |figures: &TraceFigures| made_up(folder, &[*figures]).with_guesses(self.guessed);
        Ok(LoadOptions {
            memory: Some(self.memory.parse::<Memory>()?),
            ctx: Some(self.ctx),
            selector: Some(self.selector.parse::<SelectorKind>()?),
            dip: DipOptions {
                density: self.density,
                gamma: self.gamma,
                ..DipOptions::default()
            },
            cache_policy: self.cache_policy.parse::<CachePolicy>()?,
            window_tokens: self.window_tokens,
            slots_per_layer: self.slots_per_layer,
            switches: Switches {
                overlap: self.overlap,
                bundling: self.bundling,
                lookahead: match self.lookahead {
                    true => Lookahead::Always,
                    false => Lookahead::Off,
                },
            },
            trace: self.activity.as_ref().map(trace),
            io: self.io_options()?,
            ..LoadOptions::default()
        })
    }

    pub(crate) fn io_options(&self) -> Result<IoOptions> {
        Ok(IoOptions {
            direct: self.direct.parse::<DirectIo>()?,
            threads: self.in_flight,
            engine: self.engine.parse::<Engine>()?,
            coalesce: self.bundling,
            gap_bytes: self.gap_bytes,
            slow_disk: None,
        })
    }

    /// Measures in a process of its own, inside `cgroup` if there is one.
    pub(crate) fn in_own_process(&self, cgroup: Option<&MemoryCgroup>) -> Result<RowFigures> {
        let program = std::env::current_exe().context("this program's own path")?;
        let mut command = match cgroup {
            Some(group) => group.command(&program),
            None => Command::new(&program),
        };
        command.args(["bench", "row"]);
        let output = ask(command, &serde_json::to_vec(self)?)
            .with_context(|| format!("starting {}", program.display()))?;
        if !output.status.success() {
            let kills = cgroup
                .and_then(|group| group.usage().oom_kills)
                .unwrap_or(0);
            let said = String::from_utf8_lossy(&output.stderr);
            match kills {
                0 => bail!("{}", said.trim().trim_start_matches("wick: ")),
                _ => bail!(
                    "killed for using more memory than its budget of {} bytes",
                    self.limit_bytes
                ),
            }
        }
        serde_json::from_slice(&output.stdout).context("the figures of a row")
    }

    /// Loads the model and decodes. A text that outgrows the context goes on in a new one, from its last token.
    fn measure(&self) -> Result<RowFigures> {
        let (io, predictors) = (self.io_options()?, self.predictors.as_deref());
        let folder = FlashFolder::open_with(&self.folder, io, predictors)?;
        let options = self.options(&folder)?;
        let mut model = LoadedModel::load(folder, &options)?;
        let (mut ids, mut prompt, mut logits) =
            (Ids::made_up(model.vocab_size()), None, Vec::new());
        if let Some(text) = &self.text {
            let read;
            (read, logits) = pass(&mut model, &text.prompt)?;
            (ids, prompt) = (Ids::written(text.top_p), Some(read.figures));
        }
        let mut tokens = Vec::with_capacity(self.tokens);
        for index in 0..self.warmup_tokens + self.tokens {
            let id = ids.after(&logits)?;
            if model.position() == model.ctx() {
                model.reset();
            }
            let token;
            (token, logits) = pass(&mut model, &[id])?;
            if index >= self.warmup_tokens {
                tokens.push(token.figures);
            }
        }
        let (plan, folder) = (model.plan(), model.folder());
        Ok(RowFigures {
            dram_bytes: plan.weight_bytes,
            budget_bytes: Some(plan.budget_bytes),
            peak_bytes: peak_rss_bytes(),
            reads: Some(format!("{}, {}", folder.io_mode(), folder.io_engine())),
            prompt,
            tokens,
        })
    }
}

/// Runs the program with `input` on its stdin, which it reads to the end before it says anything.
fn ask(mut command: Command, input: &[u8]) -> std::io::Result<Output> {
    let command = command.stdin(Stdio::piped());
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // Where the program ended before it had read all, its status and its words say why.
        let _ended = stdin.write_all(input);
    }
    child.wait_with_output()
}

/// The ids to decode, one by one.
enum Ids {
    /// Without a pattern: what they mean does not matter.
    MadeUp { state: u64, vocab_size: u64 },
    /// What the model says itself, also past the end of its text.
    Written(Box<Sampler>),
}

impl Ids {
    fn made_up(vocab_size: usize) -> Self {
        Self::MadeUp {
            state: SEED,
            vocab_size: vocab_size as u64,
        }
    }

    fn written(top_p: Option<f64>) -> Self {
        Self::Written(Box::new(Sampler::new(&Sampling {
            temperature: if top_p.is_some() { 1.0 } else { 0.0 },
            top_p,
            seed: SEED,
            ..Sampling::default()
        })))
    }

    /// The id after a text with these logits.
    fn after(&mut self, logits: &[f32]) -> Result<u32> {
        match self {
            Self::MadeUp { state, vocab_size } => {
                // Knuth's linear congruential generator; its upper bits are the good ones.
                *state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                Ok(((*state >> 33) % (*vocab_size).max(1)) as u32)
            }
            Self::Written(sampler) => Ok(sampler.sample(logits)?),
        }
    }
}

/// The process of one row: reads what to measure, prints its figures.
pub(crate) fn run() -> Result<ExitCode> {
    // A bench that is killed takes its rows with it; where that cannot be had, a row ends by itself some time.
    #[cfg(target_os = "linux")]
    let _best_effort = set_parent_process_death_signal(Some(Signal::KILL));
    let spec: RowSpec =
        serde_json::from_reader(std::io::stdin().lock()).context("the row's specification")?;
    output::print_json(&spec.measure()?)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// More than an argument may have on Linux, and than a pipe holds.
    const INPUT_BYTES: usize = 1 << 20;

    #[test]
    fn a_program_gets_as_much_as_there_is() {
        let mut count = Command::new("wc");
        count.arg("-c");
        let output = ask(count, &vec![b' '; INPUT_BYTES]).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text.trim(), INPUT_BYTES.to_string());
    }

    #[test]
    fn a_program_that_does_not_listen_says_why() {
        let mut deaf = Command::new("sh");
        deaf.args(["-c", "echo no >&2; exit 3"]);
        let output = ask(deaf, &vec![b' '; INPUT_BYTES]).unwrap();
        assert_eq!(
            (output.status.code(), &output.stderr[..]),
            (Some(3), &b"no\n"[..])
        );
        assert!(ask(Command::new("/no/such"), b"").is_err());
    }
}
