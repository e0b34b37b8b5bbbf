//! Flags that commands share, and the opened model that they lead to.
//!
//! `LoadArgs` is what was typed; `OpenedModel` is checked, and knows how to load.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{ensure, Context, Result};
use candle_wick::{
    CachePolicy, DirectIo, Engine, FlashFolder, IoOptions, Lookahead, Memory, SelectorKind,
    Switches,
};
use candle_wick_models::{Interrupt, LoadOptions, WickTokenizer};
use clap::Args;

use crate::dip::DipArgs;
use crate::tuned::{Settings, TUNE_FILE};
use crate::{demo, output};

/// More tokens, slots or reads than anything here takes.
const COUNT_MAX: usize = 1 << 24;
/// More threads than any machine that this is for has cores.
pub(crate) const THREADS_MAX: usize = 1024;

/// A converted folder and how to read it.
#[derive(Args, Clone, Debug)]
pub(crate) struct FolderArgs {
    /// Converted folder, or `demo` for the small model inside this program
    #[arg(value_name = "MODEL")]
    path: PathBuf,

    /// How files are read: `direct` (past the page cache), `buffered`, or `auto`, direct where the filesystem allows it
    #[arg(long, value_name = "MODE", default_value_t = DirectIo::default())]
    io: DirectIo,

    /// Reads in flight at once [default: what `wick tune` found, or 32; benches take no notice of what was found]
    #[arg(long, value_name = "COUNT")]
    io_threads: Option<usize>,

    /// Use the predictors in FILE [default: those in the folder]
    #[arg(long, value_name = "FILE")]
    predictors: Option<PathBuf>,

    /// Who makes the requests: `pool` (a thread for each in flight), `io_uring`, or `auto`, which tries both on a
    /// large model [default: what `wick tune` found, or auto]
    #[arg(long, value_name = "NAME")]
    io_engine: Option<Engine>,
}

/// A converted folder, and how to keep it in memory.
#[derive(Args, Debug)]
pub(crate) struct ModelArgs {
    #[command(flatten)]
    folder: FolderArgs,

    /// Budget: `4GiB` bounds the whole process, `60%` the share of the weights in memory [default: what is free;
    /// 60% for `demo`]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,

    /// Who chooses what is read: dense, oracle, predictors of one form (lowrank, gate), dip, dip-ca, or, to compare with
    /// these, prune-gate, prune-up, prune-glu, cats [default: the predictors that there are, else dense]
    #[arg(long, value_name = "NAME")]
    selector: Option<SelectorKind>,

    #[command(flatten)]
    dip: DipArgs,

    /// Which neuron leaves when its place is wanted: `lru` (used the longest ago) or `lfu` (used least often of late)
    #[arg(long, value_name = "NAME", default_value_t = CachePolicy::default())]
    cache_policy: CachePolicy,

    /// Drop a neuron that none of the last COUNT tokens used, even before its place is wanted [default: keep it]
    #[arg(long, value_name = "COUNT", value_parser = positive)]
    window: Option<usize>,

    /// Positions of the KV cache [default: 512, or the model's longest]
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<usize>,

    /// Keep exactly COUNT neurons of each layer, whatever the budget: for measuring
    #[arg(long, value_name = "COUNT", value_parser = positive, conflicts_with = "memory")]
    slots: Option<usize>,

    /// Compute nothing while reads are in flight: to see what overlapping brings
    #[arg(long)]
    no_overlap: bool,

    /// Read ahead what the next layer will probably want, where its input comes after attention: off, always, or,
    /// without =WHEN, auto: while it makes tokens faster
    #[arg(
        long,
        value_name = "WHEN",
        num_args = 0..=1,
        require_equals = true,
        default_value_t = Lookahead::default(),
        default_missing_value = "auto"
    )]
    lookahead: Lookahead,

    /// Threads that compute [default: what `wick tune` found, or one a core]
    #[arg(long, value_name = "COUNT", value_parser = threads)]
    threads: Option<usize>,
}

/// What is known before anything of a model's size is loaded.
pub(crate) struct OpenedModel {
    pub(crate) folder: FlashFolder,
    /// Loaded first, so that the plan counts it.
    pub(crate) tokenizer: Option<WickTokenizer>,
    pub(crate) options: LoadOptions,
    /// The folder's arguments, to open it once more in another way.
    folder_args: FolderArgs,
    /// What `wick tune` found and no flag replaced.
    pub(crate) tuned: Settings,
}

impl FolderArgs {
    pub(crate) fn is_demo(&self) -> bool {
        self.path == Path::new("demo")
    }

    fn path(&self) -> Result<PathBuf> {
        match self.is_demo() {
            true => demo::folder(),
            false => Ok(self.path.clone()),
        }
    }

    /// Opens the folder, its files read as flags say, or else as `wick tune` found, which is told on stderr.
    pub(crate) fn open(&self) -> Result<FlashFolder> {
        let path = self.path()?;
        let settings = Settings {
            threads: None,
            window_tokens: None,
            ..self.tuned(&path)
        };
        if !settings.is_default() {
            output::note(&format!("tuned: {settings}"));
        }
        self.open_as(path, self.io_with(&settings))
    }

    /// What `wick tune` found for the folder at `path` and no flag replaces; files that do not count are named.
    fn tuned(&self, path: &Path) -> Settings {
        let found = Settings::beside(path).unwrap_or_else(|reason| {
            let file = path.join(TUNE_FILE);
            output::complain(&format!(
                "{} is ignored: {}; `wick tune` makes a new one",
                file.display(),
                output::one_line(&anyhow::anyhow!(reason))
            ));
            Settings::default()
        });
        Settings {
            io_threads: found.io_threads.filter(|_| self.io_threads.is_none()),
            io_engine: found.io_engine.filter(|_| self.io_engine.is_none()),
            ..found
        }
    }

    /// Opens the folder as flags alone say: what `wick tune` found on one machine does not make a measurement
    /// that others can repeat.
    pub(crate) fn open_untuned(&self) -> Result<FlashFolder> {
        self.open_as(self.path()?, self.untuned_io())
    }

    /// Opens the folder at `path` with the predictors that flags name.
    fn open_as(&self, path: PathBuf, io: IoOptions) -> Result<FlashFolder> {
        Ok(FlashFolder::open_with(
            path,
            io,
            self.predictors.as_deref(),
        )?)
    }

    /// How [`Self::open_untuned`] reads.
    pub(crate) fn untuned_io(&self) -> IoOptions {
        self.io_with(&Settings::default())
    }

    /// Flags, then `settings`, then defaults.
    fn io_with(&self, settings: &Settings) -> IoOptions {
        let default = IoOptions::default();
        IoOptions {
            direct: self.io,
            threads: self
                .io_threads
                .or(settings.io_threads)
                .unwrap_or(default.threads),
            engine: self
                .io_engine
                .or(settings.engine())
                .unwrap_or(default.engine),
            gap_bytes: settings.gap_bytes.unwrap_or(default.gap_bytes),
            ..default
        }
    }
}

impl ModelArgs {
    pub(crate) fn is_demo(&self) -> bool {
        self.folder.is_demo()
    }

    /// What flags say of the settings that `wick tune` tries.
    pub(crate) fn given(&self) -> Settings {
        Settings {
            io_threads: self.folder.io_threads,
            io_engine: self.folder.io_engine.map(|engine| engine.to_string()),
            gap_bytes: None,
            threads: self.threads,
            window_tokens: self.window,
        }
    }

    /// Opens the folder and its tokenizer, with what `wick tune` found where no flag says otherwise.
    pub(crate) fn open(&self, interrupt: Interrupt) -> Result<OpenedModel> {
        let found = self.folder.tuned(&self.folder.path()?);
        let settings = Settings {
            threads: found.threads.filter(|_| self.threads.is_none()),
            window_tokens: found.window_tokens.filter(|_| self.window.is_none()),
            ..found
        };
        self.open_with(interrupt, &settings)
    }

    /// As [`Self::open`], with `settings` in the place of those that `wick tune` found.
    pub(crate) fn open_with(
        &self,
        interrupt: Interrupt,
        settings: &Settings,
    ) -> Result<OpenedModel> {
        self.dip.check(self.selector)?;
        if let Some(threads) = self.threads.or(settings.threads) {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build_global()
                .with_context(|| format!("starting {threads} threads"))?;
        }
        let io = self.folder.io_with(settings);
        let folder = self.folder.open_as(self.folder.path()?, io)?;
        let tokenizer = WickTokenizer::load(folder.path())?;
        if let Some(tokenizer) = &tokenizer {
            // What it builds on first use is there when the plan counts, in every command.
            tokenizer.encode("It was a dark evening.")?;
        }
        Ok(OpenedModel {
            tokenizer,
            options: self.options(interrupt, settings),
            folder,
            folder_args: self.folder.clone(),
            tuned: settings.clone(),
        })
    }

    fn options(&self, interrupt: Interrupt, settings: &Settings) -> LoadOptions {
        let is_bounded = self.memory.is_some() || self.slots.is_some();
        let default = (self.is_demo() && !is_bounded).then_some(demo::MEMORY);
        LoadOptions {
            memory: self.memory.or(default),
            ctx: self.ctx,
            selector: self.selector,
            dip: self.dip.options(),
            window_tokens: self.window.or(settings.window_tokens),
            cache_policy: self.cache_policy,
            slots_per_layer: self.slots,
            switches: Switches {
                overlap: !self.no_overlap,
                lookahead: self.lookahead,
                ..Switches::default()
            },
            trace: None,
            io: self.folder.io_with(settings),
            interrupt,
        }
    }
}

impl OpenedModel {
    /// How its files are read with `settings`, where no flag says otherwise.
    pub(crate) fn io_with(&self, settings: &Settings) -> IoOptions {
        self.folder_args.io_with(settings)
    }

    /// What `wick tune` found and is used, for people; `None` where that is nothing.
    pub(crate) fn tuned_line(&self) -> Option<String> {
        (!self.tuned.is_default()).then(|| self.tuned.to_string())
    }

    /// Refuses a text that cannot be computed, before anything of a model's size is loaded.
    pub(crate) fn check_length(&self, ids: &[u32]) -> Result<()> {
        let ctx = candle_wick_models::plan(&self.folder, &self.options)?.ctx;
        ensure!(
            !ids.is_empty(),
            "the text has 0 tokens, a model needs at least 1"
        );
        ensure!(
            ids.len() <= ctx,
            "the text has {} tokens, the context {ctx}: shorten the text, or raise --ctx up to what the model has",
            ids.len()
        );
        Ok(())
    }
}

/// Token ids as typed: numbers with commas or spaces between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TokenIds(pub(crate) Vec<u32>);

impl FromStr for TokenIds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words = text.split(|c: char| c == ',' || c.is_whitespace());
        let ids = words.filter(|word| !word.is_empty()).map(|word| {
            word.parse()
                .map_err(|_| format!("\"{word}\" is no token id; write 1,2,3"))
        });
        Ok(Self(ids.collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for TokenIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&words.join(","))
    }
}

/// A count, small enough to be added to another and to allocate by.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if count > COUNT_MAX => Err(format!("must be at most {COUNT_MAX}")),
        Ok(count) => Ok(count),
        Err(_) => Err("not a whole number".to_owned()),
    }
}

/// A [`count`] of at least one.
pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match count(text)? {
        0 => Err("must be at least 1".to_owned()),
        count => Ok(count),
    }
}

/// A count of threads: beyond the limit a machine would only be busy starting them.
fn threads(text: &str) -> Result<usize, String> {
    match positive(text)? {
        count if count > THREADS_MAX => Err(format!("must be at most {THREADS_MAX}")),
        count => Ok(count),
    }
}

/// A part of a whole, typed as `25%` or `0.25`.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let (text, whole) = match text.strip_suffix('%') {
        Some(percent) => (percent, 100.0),
        None => (text, 1.0),
    };
    // Whether 25 meant 25% is for whoever typed it to say.
    let good = "a share such as 25% or 0.25, more than 0 and at most 100%";
    let share = number(text, |_| true, good)? / whole;
    match share > 0.0 && share <= 1.0 {
        true => Ok(share),
        false => Err(format!("must be {good}")),
    }
}

/// Some time, at most an hour.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    number(
        text,
        |value| value > 0.0 && value <= 3600.0,
        "more than 0 and at most 3600",
    )
}

/// A finite number that is `good`.
pub(crate) fn number(text: &str, is_good: fn(f64) -> bool, good: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && is_good(value) => Ok(value),
        Ok(_) => Err(format!("must be {good}")),
        Err(_) => Err("not a number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        model: ModelArgs,
    }

    fn options(line: &str) -> Result<LoadOptions, clap::Error> {
        let words = ["wick"].into_iter().chain(line.split_whitespace());
        let settings = Settings {
            io_threads: Some(7),
            window_tokens: Some(9),
            ..Settings::default()
        };
        Command::try_parse_from(words)
            .map(|command| command.model.options(Interrupt::new(), &settings))
    }

    #[test]
    fn flags_become_load_options() {
        let line =
            "m --memory 1.5GiB --selector oracle --window 4 --ctx 32 --io direct --io-threads 8 --cache-policy lru";
        let all = options(line).unwrap();
        assert_eq!(all.memory, Some(Memory::Bytes(3 << 29)));
        assert_eq!(all.selector, Some(SelectorKind::Oracle));
        assert_eq!((all.window_tokens, all.ctx), (Some(4), Some(32)));
        assert_eq!(all.cache_policy, CachePolicy::Lru);
        assert_eq!((all.io.direct, all.io.threads), (DirectIo::Required, 8));
        assert_eq!(all.switches.lookahead, Lookahead::Off);
        let ahead = |line| options(line).unwrap().switches.lookahead;
        assert_eq!(ahead("--lookahead m"), Lookahead::Auto);
        assert_eq!(ahead("m --lookahead=always"), Lookahead::Always);
        let dip = options("m --selector dip-ca --density 65% --gamma 0.1 --dense-prompt").unwrap();
        assert_eq!(dip.selector, Some(SelectorKind::DipCa));
        assert_eq!((dip.dip.density, dip.dip.gamma), (0.65, 0.1));
        assert!(dip.dip.dense_prompt);
        for wrong in [
            "m --density 0.5",
            "m --selector dip --density 2",
            "m --selector dip-ca --gamma 1.5",
        ] {
            assert!(options(wrong).is_err(), "{wrong}");
        }
        let none = options("m").unwrap();
        assert_eq!((none.memory, none.selector, none.ctx), (None, None, None));
        // Where no flag says otherwise, what was tuned counts.
        assert_eq!((none.window_tokens, none.io.threads), (Some(9), 7));
        assert_eq!(none.io.direct, DirectIo::Preferred);
        assert_eq!(none.cache_policy, CachePolicy::Lfu);
    }

    #[test]
    fn the_demo_has_a_budget_of_its_own() {
        assert_eq!(options("demo").unwrap().memory, Some(demo::MEMORY));
        let asked = options("demo --memory 80%").unwrap();
        assert_eq!(asked.memory, Some(Memory::Percent(80.0)));
        assert_eq!(options("demo --slots 256").unwrap().memory, None);
        assert_eq!(options("./demo").unwrap().memory, None);
    }

    #[test]
    fn nonsense_is_refused() {
        for flags in [
            "--memory lots",
            "--memory 0%",
            "--selector best",
            "--cache-policy window",
            "--window 0",
            "--threads 0",
            "--threads 100000",
            "--slots 0",
            "--slots 18446744073709551615",
            "--window 18446744073709551615",
            "--slots 9 --memory 50%",
            "--io none",
            "--lookahead=never",
        ] {
            assert!(options(&format!("m {flags}")).is_err(), "{flags}");
        }
        assert!(options("").is_err());
    }

    #[test]
    fn shares_are_percents_or_parts_of_one() {
        assert_eq!((share("25%"), share("0.25")), (Ok(0.25), Ok(0.25)));
        assert_eq!((share("100%"), share("1")), (Ok(1.0), Ok(1.0)));
        for text in [
            "0", "0%", "1.1", "25", "101%", "-1%", "%", "nan%", "inf", "1e-400",
        ] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ids_are_numbers_with_anything_between() {
        assert_eq!("1,2, 3".parse(), Ok(TokenIds(vec![1, 2, 3])));
        assert_eq!("".parse(), Ok(TokenIds(Vec::new())));
        assert_eq!(TokenIds(vec![4, 5]).to_string(), "4,5");
        assert!("1,x".parse::<TokenIds>().unwrap_err().contains("\"x\""));
        assert!("-1".parse::<TokenIds>().is_err());
    }
}
