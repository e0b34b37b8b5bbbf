//! The model that a benchmark is about, and what has to be known of it before anything is measured.

use anyhow::{Context, Result};
use candle_wick::{BudgetPlan, FlashFolder, IoOptions, Memory, SelectorKind};
use candle_wick_models::LoadOptions;

use super::figures::{activity, synthetic_name, Activity};
use super::probe::{Rates, Records};
use super::row::RowSpec;
use crate::args::FolderArgs;

/// An opened folder.
pub(crate) struct Subject {
    pub(crate) folder: FlashFolder,
    /// Whose geometry random weights have; `None` for a real model.
    pub(crate) synthetic: Option<String>,
    /// What random weights replay.
    pub(crate) activity: Option<&'static Activity>,
}

impl Subject {
    pub(crate) fn open(args: &FolderArgs) -> Result<Self> {
        let folder = args.open()?;
        let synthetic = synthetic_name(&folder)?;
        let model_type = folder.manifest().model_type.clone();
        Ok(Self {
            activity: synthetic.as_ref().map(|_| activity(&model_type)),
            synthetic,
            folder,
        })
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

    pub(crate) fn plan(&self, memory: Memory, ctx: usize) -> Result<BudgetPlan> {
        let options = LoadOptions {
            memory: Some(memory),
            ctx: Some(ctx),
            ..LoadOptions::default()
        };
        Ok(candle_wick_models::plan(&self.folder, &options)?)
    }

    /// The model loaded with `memory` and everything else as it comes; no tokens yet.
    pub(crate) fn spec(&self, memory: Memory, ctx: usize, io: &IoOptions) -> Result<RowSpec> {
        let plan = self.plan(memory, ctx)?;
        let has_selector = plan.selector != SelectorKind::Dense;
        let activity = self.activity.filter(|_| has_selector);
        Ok(RowSpec {
            name: String::new(),
            folder: self.folder.path().to_owned(),
            memory: match memory {
                Memory::Bytes(bytes) => bytes.to_string(),
                Memory::Percent(percent) => format!("{percent}%"),
            },
            limit_bytes: plan.budget_bytes,
            selector: plan.selector.name().to_owned(),
            window_tokens: None,
            slots_per_layer: None,
            overlap: true,
            bundling: true,
            lookahead: false,
            ctx,
            in_flight: io.threads,
            engine: io.engine.to_string(),
            gap_bytes: io.gap_bytes,
            direct: io.direct.into(),
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
        let layer = &self.folder.manifest().layers[0];
        let records = Records {
            offset_bytes: extent.offset_bytes,
            stride_bytes: layer.stride_bytes,
            count: layer.intermediate_size as u64,
        };
        Rates::measure(file, &records)
    }
}
