//! `wick run`: writes on from a prompt, then says what that took.

use std::io::{stdout, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_wick_models::{LoadedModel, Sampling, Stop, TextGenerator, TextStream};
use clap::Args;

use crate::args::{number, positive, share, ModelArgs};
use crate::interrupt::{CtrlC, INTERRUPTED_STATUS};
use crate::prompt::{Prompt, PromptArgs};
use crate::report::{Meter, Phase, Report};
use crate::{demo, output};

/// Tokens to generate when nobody says.
const TOKENS_DEFAULT: usize = 128;

#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    prompt: PromptArgs,

    /// Tokens to generate at most [default: 128, 64 for `demo`]
    #[arg(short = 'n', long = "tokens", value_name = "COUNT")]
    tokens: Option<usize>,

    #[command(flatten)]
    sampling: SamplingArgs,

    /// Print one JSON object, and no text while it is made
    #[arg(long)]
    json: bool,
}

/// How to choose tokens.
#[derive(Args, Debug)]
struct SamplingArgs {
    /// 0 always takes the most likely token, 1 samples as the model weighs them [default: 0, 0.7 for `demo`]
    #[arg(long, value_name = "NUMBER", value_parser = temperature)]
    temperature: Option<f64>,

    /// Sample from the fewest tokens whose probabilities reach this sum
    #[arg(long, value_name = "SHARE", value_parser = share)]
    top_p: Option<f64>,

    /// Sample from this many of the most likely tokens
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    top_k: Option<usize>,

    /// Seed of the random numbers
    #[arg(long, value_name = "NUMBER", default_value_t = Sampling::default().seed)]
    seed: u64,

    /// Weaken tokens that were there already; 1 leaves them alone
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = factor)]
    repeat_penalty: f32,

    /// How many of the last tokens the penalty looks at
    #[arg(long, value_name = "COUNT", default_value_t = Sampling::default().repeat_last_n)]
    repeat_last_n: usize,
}

impl SamplingArgs {
    fn sampling(&self, temperature_default: f64) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(temperature_default),
            top_p: self.top_p,
            top_k: self.top_k,
            seed: self.seed,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
        }
    }
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |value| value >= 0.0, "0 or more")
}

fn factor(text: &str) -> Result<f32, String> {
    Ok(number(
        text,
        |value| (1e-3..1e3).contains(&value),
        "from 0.001 to 1000",
    )? as f32)
}

/// What was generated, and what it took.
pub(crate) struct Outcome {
    pub(crate) ids: Vec<u32>,
    /// `None` without a tokenizer.
    pub(crate) text: Option<String>,
    pub(crate) stop: Stop,
    pub(crate) prompt: Phase,
    pub(crate) decode: Phase,
    /// From the start of the prompt.
    pub(crate) first_token: Option<Duration>,
}

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    let ctrl_c = CtrlC::watch()?;
    let opened = args.model.open(ctrl_c.flag())?;
    let is_demo = args.model.is_demo();
    let prompt = args.prompt.read(is_demo.then_some(demo::PROMPT))?;
    let echo = match &prompt {
        Prompt::Text(text) if !args.json && stdout().is_terminal() => text.clone(),
        _ => String::new(),
    };
    let ids = prompt.encode(&opened)?;
    opened.check_length(&ids)?;
    let tuned = opened.tuned_line();
    let mut model = LoadedModel::load(opened.folder, &opened.options)?;
    let spelling = match &opened.tokenizer {
        Some(tokenizer) => Spelling::Words(tokenizer.stream(&ids)),
        None => Spelling::Numbers { is_first: true },
    };
    let (tokens_default, temperature_default) = if is_demo {
        (demo::TOKENS, demo::TEMPERATURE)
    } else {
        (TOKENS_DEFAULT, 0.0)
    };
    let tokens_max = args.tokens.unwrap_or(tokens_default);
    let generator = TextGenerator::new(
        &mut model,
        &args.sampling.sampling(temperature_default),
        tokens_max,
    );
    ctrl_c.arm();
    let outcome = Generation {
        spelling,
        is_silent: args.json,
        echo,
    }
    .run(generator, &ids)?;
    let report = Report::new(&model, outcome, tuned);
    if args.json {
        output::print_json(&report)?;
    } else {
        output::note(&report.to_string());
    }
    Ok(match report.stop {
        Stop::Interrupted => ExitCode::from(INTERRUPTED_STATUS),
        _ => ExitCode::SUCCESS,
    })
}

/// How tokens are written: as text, or as numbers where there is no tokenizer.
enum Spelling<'a> {
    Words(TextStream<'a>),
    Numbers { is_first: bool },
}

impl Spelling<'_> {
    fn push(&mut self, id: u32) -> Result<String> {
        match self {
            Self::Words(stream) => Ok(stream.push(id)?),
            Self::Numbers { is_first } => {
                let comma = if std::mem::take(is_first) { "" } else { "," };
                Ok(format!("{comma}{id}"))
            }
        }
    }

    fn finish(self) -> Result<String> {
        match self {
            Self::Words(stream) => Ok(stream.finish()?),
            Self::Numbers { .. } => Ok(String::new()),
        }
    }
}

/// A text in the making, on stdout as it is made.
struct Generation<'a> {
    spelling: Spelling<'a>,
    is_silent: bool,
    /// Shown before it: on a screen the text reads on from the prompt, a file gets the text alone.
    echo: String,
}

impl Generation<'_> {
    fn run(mut self, mut generator: TextGenerator<'_>, prompt: &[u32]) -> Result<Outcome> {
        self.write(&self.echo)?;
        let started = Instant::now();
        let meter = Meter::start(&generator);
        generator.prompt(prompt)?;
        let prompt = meter.stop(&generator);
        let meter = Meter::start(&generator);
        let is_text = matches!(self.spelling, Spelling::Words(_));
        let (mut ids, mut text, mut first_token) = (Vec::new(), String::new(), None);
        let ended = loop {
            let piece = match generator.next_token() {
                Ok(Some(id)) => {
                    first_token.get_or_insert_with(|| started.elapsed());
                    ids.push(id);
                    self.spelling.push(id)?
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            self.write(&piece)?;
            text.push_str(&piece);
        };
        let decode = meter.stop(&generator);
        let rest = self.spelling.finish()?;
        text.push_str(&rest);
        let is_line_open = !ids.is_empty() || !self.echo.is_empty();
        if !self.is_silent && is_line_open {
            output::print(&format!("{rest}\n"))?;
        }
        ended?;
        Ok(Outcome {
            ids,
            text: is_text.then_some(text),
            stop: generator.stop().unwrap_or(Stop::Length),
            prompt,
            decode,
            first_token,
        })
    }

    fn write(&self, piece: &str) -> Result<()> {
        if !self.is_silent && !piece.is_empty() {
            output::print(piece)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        run: RunArgs,
    }

    fn parse(line: &str) -> Result<RunArgs, clap::Error> {
        let words = ["wick", "model"].into_iter().chain(line.split_whitespace());
        Command::try_parse_from(words).map(|command| command.run)
    }

    #[test]
    fn the_default_is_greedy_without_penalty() {
        let args = parse("").unwrap();
        assert_eq!(args.sampling.sampling(0.0), Sampling::default());
        assert_eq!((args.tokens, args.json), (None, false));
    }

    #[test]
    fn sampling_flags_are_taken_and_nonsense_is_refused() {
        let line = "-n 0 --temperature 0.8 --top-p 0.9 --top-k 40 --seed 7 --repeat-penalty 1.1 --repeat-last-n 8";
        let args = parse(line).unwrap();
        let expected = Sampling {
            temperature: 0.8,
            top_p: Some(0.9),
            top_k: Some(40),
            seed: 7,
            repeat_penalty: 1.1,
            repeat_last_n: 8,
        };
        assert_eq!(
            (args.sampling.sampling(0.0), args.tokens),
            (expected, Some(0))
        );
        for flags in [
            "--temperature nan",
            "--temperature=-1",
            "--top-p 0",
            "--top-p 1.5",
            "--top-k 0",
            "--repeat-penalty 0",
            "--repeat-penalty inf",
            "--seed -1",
            "-n -1",
        ] {
            assert!(parse(flags).is_err(), "{flags}");
        }
    }

    #[test]
    fn ids_are_spelt_as_they_can_be_typed() {
        let mut spelling = Spelling::Numbers { is_first: true };
        let pieces: Vec<String> = [3, 4, 5].map(|id| spelling.push(id).unwrap()).into();
        assert_eq!(pieces.concat(), "3,4,5");
    }
}
