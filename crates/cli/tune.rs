//! `wick tune`: tries settings on the model's first layers and keeps those that are faster beyond noise.
//!
//! One kind of setting after the other, each candidate in a duel with the best so far: both decode by turns, so that a
//! machine that others use too disturbs both alike. A candidate wins when it is clearly faster in the median and in
//! nearly every round. What is left at the end has to win against the defaults once more. What a flag says is not tried:
//! flags go before settings, here as in every command.
//!
//! Not here: the file that keeps the settings (`tuned`).

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use candle_wick::{BudgetPlan, Engine, FlashFolder, HumanBytes, SelectorKind};
use candle_wick_models::Interrupt;
use clap::Args;
use serde::Serialize;

use crate::activity::Expected;
use crate::args::{seconds, ModelArgs, OpenedModel};
use crate::front::{Front, FrontSpec};
use crate::machine::Machine;
use crate::output;
use crate::spread::Spread;
use crate::tuned::{Gain, Settings, TUNE_FILE};

const ROUNDS: usize = 7;
/// Rounds to be faster in, of all.
const WINS_MIN: usize = 6;
/// Below this share of the other's time a candidate is faster beyond noise.
const CLEARLY_FASTER: f64 = 0.95;
/// A round takes about this, and at least two tokens.
const ROUND_TIME: Duration = Duration::from_millis(80);
const ROUND_TOKENS: (u32, u32) = (2, 64);
/// A model that misses nothing in so many tokens reads nothing that matters.
const READS_TOKENS: usize = 8;

#[derive(Args, Debug)]
#[command(
    after_help = "Settings are tried on two copies of the model's first layers side by side, each with slots as\n\
                  --memory leads to: together they may take more than --memory says. What a flag sets is not\n\
                  tried. Settings of an earlier run are removed where some were tried and none is better than the\n\
                  defaults."
)]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// No new candidate is tried after this
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    seconds: f64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What came of it.
#[derive(Serialize)]
struct Outcome {
    settings: Settings,
    gain: Gain,
    /// Settings tried.
    duels: usize,
    is_stored: bool,
    /// Whether settings of an earlier run were, and are gone.
    is_removed: bool,
}

/// A model that settings are tried on.
struct Bench<'a> {
    model: &'a OpenedModel,
    spec: FrontSpec,
    /// What flags say, which is not tried.
    given: Settings,
    deadline: Instant,
    /// Whether the time ended before the settings did.
    is_cut_short: bool,
    duels: usize,
}

/// Settings, and layers loaded with them.
struct Contestant {
    settings: Settings,
    front: Front,
}

/// Medians of a token's time, and whether the challenger won.
struct Duel {
    champion_ms: f64,
    challenger_ms: f64,
    is_won: bool,
}

pub(crate) fn run(args: &TuneArgs) -> Result<ExitCode> {
    let model = args
        .model
        .open_with(Interrupt::new(), &Settings::default())?;
    let plan = candle_wick_models::plan(&model.folder, &model.options)?;
    ensure!(
        !plan.goes_by_columns(),
        "layers that go by columns cannot be tuned yet: what they miss depends on the text"
    );
    let expected = Expected::of(&model.folder, &plan, model.options.cache_policy)?;
    let mut bench = Bench {
        spec: FrontSpec::new(&model.folder, &plan, &model.options, &expected),
        model: &model,
        given: args.model.given(),
        deadline: Instant::now() + Duration::from_secs_f64(args.seconds),
        is_cut_short: false,
        duels: 0,
    };
    output::note(&format!(
        "trying settings on the first {} of {} layers, for about {} s",
        bench.spec.layers, bench.spec.layers_of_model, args.seconds
    ));
    let (settings, duel) = bench.search(&plan)?;
    let gain = Gain {
        memory: HumanBytes(plan.budget_bytes).to_string(),
        date: Machine::this().date,
        default_ms: duel.champion_ms,
        tuned_ms: duel.challenger_ms,
    };
    let folder = model.folder.path();
    let duels = bench.duels;
    let is_stored = !settings.is_default();
    // Where not all was tried, what was found before may still be better.
    let is_removed = !is_stored && duels > 0 && !bench.is_cut_short && Settings::remove(folder)?;
    if is_stored {
        settings.write(folder, &gain)?;
    }
    let outcome = Outcome {
        settings,
        gain,
        duels,
        is_stored,
        is_removed,
    };
    match args.json {
        true => output::print_json(&outcome)?,
        false => output::print(&outcome.summary(&folder.join(TUNE_FILE).display().to_string()))?,
    }
    Ok(ExitCode::SUCCESS)
}

impl Outcome {
    fn summary(&self, file: &str) -> String {
        let Gain {
            default_ms,
            tuned_ms,
            ..
        } = &self.gain;
        if self.is_stored {
            return format!(
                "tuned: {}\n{tuned_ms:.3} ms a token in these layers, {default_ms:.3} with the defaults; in {file}\n",
                self.settings
            );
        }
        if self.duels == 0 {
            return format!("no settings were tried; {file} is left as it was\n");
        }
        let gone = match self.is_removed {
            true => "was removed",
            false => "is not written",
        };
        format!(
            "none of {} settings is faster than the defaults beyond noise: they stay, and {file} {gone}\n",
            self.duels
        )
    }
}

impl Bench<'_> {
    /// The best settings, and the last duel of the defaults with them.
    fn search(&mut self, plan: &BudgetPlan) -> Result<(Settings, Duel)> {
        let mut champion = self.contestant(Settings::default())?;
        let reads = !plan.streamed.is_empty() || champion.misses_some()?;
        if !reads {
            output::note("nothing is read at this budget: only compute threads can matter");
        }
        let is_sparse = plan.selector != SelectorKind::Dense;
        let kinds = kinds(reads, is_sparse, &self.given);
        'kinds: for kind in kinds {
            let base = champion.settings.clone();
            for change in kind {
                if Instant::now() > self.deadline {
                    output::note("time is up: what is left was not tried");
                    self.is_cut_short = true;
                    break 'kinds;
                }
                let settings = change(base.clone());
                if settings != champion.settings {
                    champion = self.duel_for(champion, settings)?;
                }
            }
        }
        if champion.settings.is_default() {
            let token_ms = champion.round_ms(1)?;
            let duel = Duel {
                champion_ms: token_ms,
                challenger_ms: token_ms,
                is_won: false,
            };
            return Ok((Settings::default(), duel));
        }
        let mut defaults = self.contestant(Settings::default())?;
        let duel = Duel::fight(&mut defaults, &mut champion)?;
        let settings = match duel.is_won {
            true => champion.settings,
            false => Settings::default(),
        };
        Ok((settings, duel))
    }

    /// The winner of a duel, which is told.
    fn duel_for(&mut self, mut champion: Contestant, settings: Settings) -> Result<Contestant> {
        let mut challenger = self.contestant(settings)?;
        let duel = Duel::fight(&mut champion, &mut challenger)?;
        self.duels += 1;
        output::note(&format!(
            "{}: {:.3} ms against {:.3} with {}: {}",
            challenger.settings,
            duel.challenger_ms,
            duel.champion_ms,
            champion.settings,
            if duel.is_won {
                "ahead"
            } else {
                "not faster beyond noise"
            }
        ));
        Ok(if duel.is_won { challenger } else { champion })
    }

    fn contestant(&self, settings: Settings) -> Result<Contestant> {
        let io = self.model.io_with(&settings);
        let folder = &self.model.folder;
        let folder = FlashFolder::open_with(folder.path(), io, folder.predictors_path())?;
        let spec = match settings.window_tokens {
            None => self.spec.clone(),
            window => self.spec.with_window(window),
        };
        // The model takes as many threads as the pool that it is loaded in.
        let threads = settings.threads.unwrap_or_else(rayon::current_num_threads);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.with_context(|| format!("starting {threads} threads"))?;
        let mut front = pool.install(|| spec.load(&folder))?;
        let prompt = front.pass(1)?;
        front.warm_up(prompt.ffn.misses)?;
        Ok(Contestant { settings, front })
    }
}

type Change = Box<dyn Fn(Settings) -> Settings>;

/// What may be changed, kind by kind: where something is read, where neurons are chosen, and what no flag gives.
fn kinds(reads: bool, is_sparse: bool, given: &Settings) -> Vec<Vec<Change>> {
    let depth = |count: usize| -> Change {
        Box::new(move |base| Settings {
            io_threads: Some(count),
            ..base
        })
    };
    let engine = |engine: Engine| -> Change {
        Box::new(move |base| Settings {
            io_engine: Some(engine.to_string()),
            ..base
        })
    };
    let gap = |bytes: usize| -> Change {
        Box::new(move |base| Settings {
            gap_bytes: Some(bytes),
            ..base
        })
    };
    let threads = |count: usize| -> Change {
        Box::new(move |base| Settings {
            threads: Some(count),
            ..base
        })
    };
    let window = |tokens: usize| -> Change {
        Box::new(move |base| Settings {
            window_tokens: Some(tokens),
            ..base
        })
    };
    let fewer: Vec<usize> = std::iter::successors(Some(1), |count| Some(2 * count))
        .take_while(|&count| count < rayon::current_num_threads())
        .collect();
    let chooses = reads && is_sparse;
    let kinds: [(bool, Vec<Change>); 5] = [
        (
            reads && given.io_engine.is_none(),
            [Engine::Uring, Engine::Pool].map(engine).into(),
        ),
        (
            reads && given.io_threads.is_none(),
            [64, 16, 8].map(depth).into(),
        ),
        (chooses, [32 << 10, 0].map(gap).into()),
        (
            chooses && given.window_tokens.is_none(),
            [16, 4].map(window).into(),
        ),
        (
            given.threads.is_none(),
            fewer.into_iter().map(threads).collect(),
        ),
    ];
    kinds
        .into_iter()
        .filter_map(|(matters, kind)| matters.then_some(kind))
        .collect()
}

impl Contestant {
    /// Whether some of the next tokens read records.
    fn misses_some(&mut self) -> Result<bool> {
        for _ in 0..READS_TOKENS {
            if self.front.pass(1)?.ffn.misses > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Milliseconds of a token, over `tokens` tokens.
    fn round_ms(&mut self, tokens: u32) -> Result<f64> {
        let mut total = Duration::ZERO;
        for _ in 0..tokens {
            let times = self.front.pass(1)?.times;
            total += times.layers + times.head;
        }
        Ok(1000.0 * total.as_secs_f64() / f64::from(tokens.max(1)))
    }
}

impl Duel {
    fn fight(champion: &mut Contestant, challenger: &mut Contestant) -> Result<Self> {
        let token_ms = champion.round_ms(1)?.max(challenger.round_ms(1)?);
        let tokens = 1000.0 * ROUND_TIME.as_secs_f64() / token_ms.max(1e-3);
        let tokens = (tokens as u32).clamp(ROUND_TOKENS.0, ROUND_TOKENS.1);
        let mut rounds = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            rounds.push((champion.round_ms(tokens)?, challenger.round_ms(tokens)?));
        }
        Ok(Self::of(&rounds))
    }

    /// By the times of both in each round.
    fn of(rounds: &[(f64, f64)]) -> Self {
        let champion_ms = Spread::of(rounds.iter().map(|round| round.0)).median;
        let challenger_ms = Spread::of(rounds.iter().map(|round| round.1)).median;
        let wins = rounds.iter().filter(|round| round.1 < round.0).count();
        Self {
            champion_ms,
            challenger_ms,
            is_won: wins >= WINS_MIN && challenger_ms < CLEARLY_FASTER * champion_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_wins_no_duel() {
        let won = |rounds: &[(f64, f64)]| Duel::of(rounds).is_won;
        assert!(won(&[(10.0, 8.0); ROUNDS]));
        assert!(!won(&[(10.0, 9.8); ROUNDS]));
        assert!(!won(&[(10.0, 10.0); ROUNDS]));
        let mut mixed = [(10.0, 8.0); ROUNDS];
        mixed[0].1 = 12.0;
        assert!(won(&mixed));
        mixed[1].1 = 12.0;
        assert!(!won(&mixed));
    }

    #[test]
    fn what_a_flag_says_is_not_tried() {
        let tried = |reads, is_sparse, given: &Settings| -> Vec<Settings> {
            let kinds = kinds(reads, is_sparse, given);
            let changes = kinds.iter().flatten();
            changes.map(|change| change(Settings::default())).collect()
        };
        let nothing = Settings::default();
        let all = tried(true, true, &nothing);
        for is_set in [
            |one: &Settings| one.io_engine.is_some(),
            |one: &Settings| one.io_threads.is_some(),
            |one: &Settings| one.gap_bytes.is_some(),
            |one: &Settings| one.window_tokens.is_some(),
        ] {
            assert!(all.iter().any(is_set));
        }
        let given = Settings {
            io_engine: Some("pool".to_owned()),
            io_threads: Some(8),
            threads: Some(1),
            window_tokens: Some(4),
            ..nothing.clone()
        };
        let rest = tried(true, true, &given);
        let is_gap = |one: &Settings| {
            *one == Settings {
                gap_bytes: one.gap_bytes,
                ..Settings::default()
            }
        };
        assert!(!rest.is_empty() && rest.iter().all(is_gap), "{rest:?}");
        let dense = tried(true, false, &nothing);
        assert!(dense.iter().all(|one| one.window_tokens.is_none()));
        let no_reads = tried(false, true, &nothing);
        assert!(no_reads.iter().all(|one| one.threads.is_some()));
    }
}
