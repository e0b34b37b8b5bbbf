//! The model that a benchmark is about, and what has to be known of it before anything is measured.

use std::path::Path;

use anyhow::{Context, Result};
use candle_wick::{BudgetPlan, CachePolicy, FlashFolder, IoOptions, Memory};
use candle_wick_models::{LoadOptions, WickTokenizer};
use clap::Args;

use super::row::RowSpec;
use crate::args::FolderArgs;
use crate::probe::{Rates, Records};
use crate::synthetic::{activity, synthetic_name, Activity};

/// What is measured, and how all its rows read and keep it: as flags and defaults say, whatever `wick tune` found.
#[derive(Args, Debug)]
pub(crate) struct SubjectArgs {
    #[command(flatten)]
    pub(crate) folder: FolderArgs,

    /// Which neuron leaves when its place is wanted: `lru` (used the longest ago) or `lfu` (used least often of late)
    #[arg(long, value_name = "NAME", default_value_t = CachePolicy::default())]
    pub(crate) cache_policy: CachePolicy,
}

/// An opened folder.
pub(crate) struct Subject {
    pub(crate) folder: FlashFolder,
    /// Whose geometry random weights have; `None` for a real model.
    pub(crate) synthetic: Option<String>,
    /// What random weights replay.
    pub(crate) activity: Option<&'static Activity>,
    cache_policy: CachePolicy,
    io: IoOptions,
}

impl Subject {
    pub(crate) fn open(args: &SubjectArgs) -> Result<Self> {
        let folder = args.folder.open_untuned()?;
        let synthetic = synthetic_name(&folder)?;
        let model_type = folder.manifest().model_type.clone();
        Ok(Self {
            activity: synthetic.as_ref().map(|_| activity(&model_type)),
            synthetic,
            folder,
            cache_policy: args.cache_policy,
            io: args.folder.untuned_io(),
        })
    }

    /// The tokenizer of a folder that is given text.
    pub(crate) fn tokenizer(&self) -> Result<WickTokenizer> {
        WickTokenizer::load(self.folder.path())?
            .context("no tokenizer in this folder, so --text-file has no meaning")
    }

    /// A context of `wanted` positions, or the one that loading takes by default where the model has not as many.
    pub(crate) fn ctx_up_to(&self, wanted: usize) -> Result<usize> {
        let with = |ctx| LoadOptions {
            ctx,
            ..LoadOptions::default()
        };
        match candle_wick_models::plan(&self.folder, &with(Some(wanted))) {
            Ok(plan) => Ok(plan.ctx),
            Err(_) => Ok(candle_wick_models::plan(&self.folder, &with(None))?.ctx),
        }
    }

    /// Loading with `memory`, and everything else as arguments say or as it comes.
    pub(crate) fn options(&self, memory: Memory, ctx: usize) -> LoadOptions {
        LoadOptions {
            memory: Some(memory),
            ctx: Some(ctx),
            cache_policy: self.cache_policy,
            io: self.io.clone(),
            ..LoadOptions::default()
        }
    }

    pub(crate) fn plan(&self, memory: Memory, ctx: usize) -> Result<BudgetPlan> {
        Ok(candle_wick_models::plan(
            &self.folder,
            &self.options(memory, ctx),
        )?)
    }

    /// The model loaded with `options`, every part on but reading ahead; no tokens yet.
    pub(crate) fn spec(&self, options: &LoadOptions) -> Result<RowSpec> {
        let plan = candle_wick_models::plan(&self.folder, options)?;
        let memory = options.memory.context("a row without a budget")?;
        let has_predictors = plan.selector.form().is_some();
        let activity = self.activity.filter(|_| has_predictors);
        Ok(RowSpec {
            folder: self.folder.path().to_owned(),
            predictors: self.folder.predictors_path().map(Path::to_owned),
            memory: memory.to_string(),
            // Slots asked for one by one may come to more than the budget, or to less.
            limit_bytes: match memory {
                Memory::Bytes(bytes) => plan.budget_bytes.max(bytes),
                Memory::Percent(_) => plan.budget_bytes,
            },
            selector: plan.selector.name().to_owned(),
            density: options.dip.density,
            gamma: options.dip.gamma,
            cache_policy: options.cache_policy.to_string(),
            window_tokens: options.window_tokens,
            slots_per_layer: options.slots_per_layer,
            overlap: true,
            bundling: true,
            lookahead: false,
            ctx: plan.ctx,
            in_flight: options.io.threads,
            engine: options.io.engine.to_string(),
            gap_bytes: options.io.gap_bytes,
            direct: options.io.direct.to_string(),
            activity: activity.map(|activity| activity.figures),
            guessed: 0.0,
            text: None,
            warmup_tokens: 0,
            tokens: 0,
        })
    }

    /// What the device that holds the folder and the memory can do.
    pub(crate) fn rates(&self) -> Result<Rates> {
        let (file, extent) = self
            .folder
            .record_extent(0)
            .context("a model without layers")?;
        let records = Records {
            offset_bytes: extent.offset_bytes,
            stride_bytes: extent.shape[1],
            count: extent.shape[0] as u64,
        };
        Rates::measure(file, &records)
    }
}
