//! From a converted folder to a model under a budget, for whichever family its config names.

use std::path::Path;
use std::time::{Duration, Instant};

use candle::{Device, IndexOp, Tensor};
use candle_wick::{
    release_free_heap, Activation, ActivityTrace, BudgetPlan, CachePolicy, ComputePool, DipOptions,
    FfnRecorder, FfnStats, FlashFolder, FlashVarBuilder, IoOptions, Memory, Placement, PlanOptions,
    PredictorInput, SelectionRecorder, SelectorKind, Switches,
};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::family::{parse_config, CausalLm, ModelConfig};
use crate::interrupt::{Interrupt, INTERRUPTED};

/// Context when nobody asks for one: long enough to try a model, and its KV stays small.
const CTX_DEFAULT: usize = 512;

/// How to load a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// The budget; `None` keeps all weights in DRAM, as far as 90 % of the free memory goes.
    pub memory: Option<Memory>,
    /// Positions of the KV cache; by default 512, or the model's maximum when that is smaller.
    pub ctx: Option<usize>,
    /// Who chooses neurons; by default what uses the folder's predictors, and `Dense` where it has none.
    pub selector: Option<SelectorKind>,
    /// What selectors with a density keep.
    pub dip: DipOptions,
    /// Drop a neuron when none of this many tokens used it; `None` keeps it until its slot is wanted.
    pub window_tokens: Option<usize>,
    /// Which neuron leaves when its slot is wanted.
    pub cache_policy: CachePolicy,
    /// Exactly this many slots a layer instead of what the budget leaves: for measuring.
    pub slots_per_layer: Option<usize>,
    /// What is switched off and on, to see what it brings.
    pub switches: Switches,
    /// Neurons to use instead of those that predictors choose: for measuring with random weights.
    pub trace: Option<ActivityTrace>,
    /// How files are read.
    pub io: IoOptions,
    /// Stops a forward pass between two layers.
    pub interrupt: Interrupt,
}

/// The folder's config, which must be that of the model that was converted.
pub(crate) fn read_config(folder: &FlashFolder) -> Result<(Box<dyn ModelConfig>, Value)> {
    let path = folder.path().join("config.json");
    let (config, json) = parse(&path, &folder.config_json()?)?;
    let (got, expected) = (config.num_hidden_layers(), folder.manifest().layers.len());
    if got != expected {
        let reason = format!("num_hidden_layers is {got}, the folder holds {expected} layers");
        return Err(Error::Config { path, reason });
    }
    let mut layers = folder.manifest().layers.iter();
    if layers.any(|layer| layer.gate.is_some() != config.is_gated()) {
        let has = if config.is_gated() { "has" } else { "has not" };
        let reason =
            format!("the FFN of this model {has} a gate, unlike that of the folder's layers");
        return Err(Error::Config { path, reason });
    }
    Ok((config, json))
}

pub(crate) fn parse(path: &Path, text: &str) -> Result<(Box<dyn ModelConfig>, Value)> {
    let fail = |reason: String| Error::Config {
        path: path.to_owned(),
        reason,
    };
    let json: Value = serde_json::from_str(text).map_err(|error| fail(error.to_string()))?;
    let config = parse_config(&json).map_err(fail)?;
    Ok((config, json))
}

/// A model in DRAM and on flash, for one sequence at a time.
pub struct LoadedModel {
    pool: ComputePool,
    model: Box<dyn CausalLm>,
    vb: FlashVarBuilder,
    plan: BudgetPlan,
    position: usize,
    vocab_size: usize,
    kv_position_bytes: u64,
    eos_token_ids: Vec<u32>,
    activation: Activation,
}

/// What a forward pass took.
#[derive(Clone, Copy, Debug, Default)]
pub struct ForwardTimes {
    /// The layers, with looking up embeddings and the last norm.
    pub layers: Duration,
    /// The head, with reading it where it is streamed.
    pub head: Duration,
    /// Waiting for a streamed head's reads.
    pub head_io: Duration,
}

/// Refuses the text of a `config.json`, at `path`, that no model here can be made from.
pub fn check_config(path: &Path, text: &str) -> Result<()> {
    let (config, _) = parse(path, text)?;
    config.activation()?;
    Ok(())
}

/// What would be in DRAM, and nothing loaded.
pub fn plan(folder: &FlashFolder, options: &LoadOptions) -> Result<BudgetPlan> {
    let (config, _) = read_config(folder)?;
    // Its threads belong to what a process holds that loads the model.
    let _pool = ComputePool::new()?;
    plan_for(folder, config.as_ref(), options)
}

fn plan_for(
    folder: &FlashFolder,
    config: &dyn ModelConfig,
    options: &LoadOptions,
) -> Result<BudgetPlan> {
    let plan = plan_budget(folder, config, options)?;
    Ok(match options.slots_per_layer {
        Some(slots) => plan.with_slots(folder, slots),
        None => plan,
    })
}

fn plan_budget(
    folder: &FlashFolder,
    config: &dyn ModelConfig,
    options: &LoadOptions,
) -> Result<BudgetPlan> {
    let longest = config.max_position_embeddings();
    let ctx = options.ctx.unwrap_or(longest.min(CTX_DEFAULT));
    if ctx == 0 || ctx > longest {
        let path = folder.path().join("config.json");
        let reason = format!("a context of {ctx} was asked for, the model's longest is {longest}");
        return Err(Error::Config { path, reason });
    }
    let activation = config.activation()?;
    let selector = SelectorKind::chosen(options.selector, folder, activation, options.dip)?;
    let plan_options = PlanOptions {
        memory: options.memory,
        selector,
        window_tokens: options.window_tokens,
        process_bytes: 0,
        other_bytes: 0,
    };
    Ok(BudgetPlan::for_machine(
        folder,
        &config.needs(ctx),
        plan_options,
    )?)
}

/// Loads the model of a converted folder.
pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<LoadedModel> {
    LoadedModel::load(FlashFolder::open(path, options.io.clone())?, options)
}

impl LoadedModel {
    /// Loads the model of an opened folder.
    pub fn load(folder: FlashFolder, options: &LoadOptions) -> Result<Self> {
        let (config, json) = read_config(&folder)?;
        let pool = ComputePool::new()?;
        let plan = plan_for(&folder, config.as_ref(), options)?;
        Self::load_planned(folder, (config.as_ref(), &json), pool, plan, options)
    }

    /// Loads what `plan` says of the model that the config describes.
    pub(crate) fn load_planned(
        folder: FlashFolder,
        (config, json): (&dyn ModelConfig, &Value),
        pool: ComputePool,
        plan: BudgetPlan,
        options: &LoadOptions,
    ) -> Result<Self> {
        let placement = Placement {
            switches: options.switches,
            cache_policy: options.cache_policy,
            dip: options.dip,
            trace: options.trace.clone(),
            ..plan.placement()
        };
        let vb = FlashVarBuilder::new(&folder, placement);
        let model = config.load(vb.clone(), plan.ctx, options.interrupt.clone())?;
        // What loading left free would count beside the scratch.
        release_free_heap();
        plan.prove_scratch();
        let needs = config.needs(plan.ctx);
        Ok(Self {
            pool,
            model,
            vb,
            vocab_size: needs.vocab_size,
            kv_position_bytes: needs.kv_position_bytes,
            plan,
            position: 0,
            activation: config.activation()?,
            eos_token_ids: eos_token_ids(&folder, json),
        })
    }

    /// Appends `ids` and gives the logits after the last of them.
    pub fn forward(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        Ok(self.forward_timed(ids)?.0)
    }

    /// As [`Self::forward`], and what it took.
    pub fn forward_timed(&mut self, ids: &[u32]) -> Result<(Vec<f32>, ForwardTimes)> {
        self.check(ids)?;
        let started = Instant::now();
        let mut last = None;
        self.vb.set_prompt(ids.len() > 1);
        for chunk in ids.chunks(self.plan.chunk_tokens) {
            let hidden = self.hidden_states(chunk)?;
            last = Some(hidden.i((.., chunk.len() - 1))?);
        }
        let last = last.ok_or(Error::EmptyPrompt)?;
        let layers = started.elapsed();
        let io_before = self.folder().matrix_stats().io;
        let logits = self.logits(&last)?.flatten_all()?.to_vec1()?;
        let head = started.elapsed() - layers;
        let times = ForwardTimes {
            layers,
            head,
            head_io: self.folder().matrix_stats().io - io_before,
        };
        Ok((logits, times))
    }

    /// Appends `ids` and calls `each(index, logits)` with the logits after each of them.
    pub fn forward_each(
        &mut self,
        ids: &[u32],
        each: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.check(ids)?;
        // What is scored stands for what would have been written.
        self.vb.set_prompt(false);
        let mut index = 0;
        let together = self.plan.logits_tokens();
        for chunk in ids.chunks(self.plan.chunk_tokens) {
            let hidden = self.hidden_states(chunk)?;
            for start in (0..chunk.len()).step_by(together) {
                let count = together.min(chunk.len() - start);
                let logits = self.logits(&hidden.narrow(1, start, count)?)?;
                for logits in logits
                    .flatten_all()?
                    .to_vec1::<f32>()?
                    .chunks(self.vocab_size)
                {
                    each(index, logits)?;
                    index += 1;
                }
            }
        }
        Ok(())
    }

    fn check(&self, ids: &[u32]) -> Result<()> {
        if ids.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if self.position + ids.len() > self.plan.ctx {
            let (position, tokens, ctx) = (self.position, ids.len(), self.plan.ctx);
            return Err(Error::ContextFull {
                position,
                tokens,
                ctx,
            });
        }
        match ids.iter().find(|id| **id as usize >= self.vocab_size) {
            Some(&id) => Err(Error::UnknownId {
                id,
                vocab_size: self.vocab_size,
            }),
            None => Ok(()),
        }
    }

    fn hidden_states(&mut self, chunk: &[u32]) -> Result<Tensor> {
        let ids = Tensor::new(chunk, &Device::Cpu)?.unsqueeze(0)?;
        let (model, position) = (&mut self.model, self.position);
        match self.pool.run(|| model.hidden_states(&ids, position)) {
            Ok(hidden) => {
                self.position += chunk.len();
                Ok(hidden)
            }
            Err(error) => {
                // Some layers have seen the chunk and others not: only a new sequence is sound now.
                self.reset();
                Err(if error.to_string().starts_with(INTERRUPTED) {
                    Error::Interrupted
                } else {
                    error.into()
                })
            }
        }
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.pool.run(|| self.model.logits(hidden))?)
    }

    /// Starts a new sequence; neurons stay in DRAM.
    pub fn reset(&mut self) {
        self.rewind(0);
    }

    /// Goes back to the first `position` tokens of the sequence, to go on from there in another way; a later
    /// position than the model is at changes nothing.
    pub fn rewind(&mut self, position: usize) {
        self.model.truncate_kv_cache(position);
        if position == 0 {
            self.vb.begin_sequence();
        }
        self.position = self.position.min(position);
    }

    /// Whether going back to the middle of a sequence would give other numbers than going there from its start.
    pub(crate) fn depends_on_history(&self) -> bool {
        self.vb.depends_on_history()
    }

    /// Tokens seen so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Positions that the KV cache holds.
    pub fn ctx(&self) -> usize {
        self.plan.ctx
    }

    /// Bytes of one position's keys and values, over all layers.
    pub fn kv_position_bytes(&self) -> u64 {
        self.kv_position_bytes
    }

    /// Logits of one position.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Ids that end a text.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// The activation of its FFNs.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// What is in DRAM.
    pub fn plan(&self) -> &BudgetPlan {
        &self.plan
    }

    /// The folder the model came from.
    pub fn folder(&self) -> &FlashFolder {
        self.vb.folder()
    }

    /// What the FFNs did, all layers added up.
    pub fn stats(&self) -> FfnStats {
        let mut sum = FfnStats::default();
        self.vb
            .ffn_stats()
            .into_iter()
            .for_each(|layer| sum += layer);
        sum
    }

    /// What each FFN did.
    pub fn layer_stats(&self) -> Vec<FfnStats> {
        self.vb.ffn_stats()
    }

    /// Shows the inputs of every FFN to `recorder` from now on, or to nobody.
    pub fn record_ffn_inputs(&self, recorder: Option<FfnRecorder>) {
        self.vb.record_ffn_inputs(recorder);
    }

    /// Shows what predictors of this kind would look at, in every FFN, to `recorder` from now on, or to nobody.
    pub fn record_inputs(&self, kind: PredictorInput, recorder: Option<FfnRecorder>) {
        self.vb.record_inputs(kind, recorder);
    }

    /// Shows what each token's neurons are, in every FFN, to `recorder` from now on, or to nobody.
    pub fn record_selections(&self, recorder: Option<SelectionRecorder>) {
        self.vb.record_selections(recorder);
    }

    /// Whether a made-up history stands in for what the selector chooses.
    pub fn is_replaying(&self) -> bool {
        self.vb.is_replaying()
    }

    /// Candle's own `VarBuilder` over the same folder.
    pub fn dense_weights(&self) -> candle_nn::VarBuilder<'static> {
        self.vb.dense()
    }

    /// Starts counting anew.
    pub fn reset_stats(&self) {
        self.vb.reset_ffn_stats();
    }
}

/// `eos_token_id`, a number or a list, of `generation_config.json` and `config.json`.
fn eos_token_ids(folder: &FlashFolder, config: &Value) -> Vec<u32> {
    let generation = std::fs::read_to_string(folder.path().join("generation_config.json")).ok();
    let generation: Option<Value> = generation.and_then(|json| serde_json::from_str(&json).ok());
    let mut ids = Vec::new();
    for source in generation.iter().chain([config]) {
        match source.get("eos_token_id") {
            Some(Value::Array(list)) => ids.extend(list.iter().filter_map(Value::as_u64)),
            Some(value) => ids.extend(value.as_u64()),
            None => {}
        }
    }
    let mut ids: Vec<u32> = ids
        .into_iter()
        .filter_map(|id| u32::try_from(id).ok())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
