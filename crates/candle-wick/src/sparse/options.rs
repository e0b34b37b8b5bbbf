//! How a stock model is run from flash, and what of the budget is candle's.

use candle::DType;

use super::facts::{embeddings, StockFacts, StructKind, HEAD};
use crate::activation::Activation;
use crate::budget::{BudgetPlan, ModelNeeds, PlanOptions};
use crate::dip::DipOptions;
use crate::error::{Error, Result};
use crate::eviction_order::CachePolicy;
use crate::folder::FlashFolder;
use crate::memory::{HumanBytes, Memory};
use crate::selector_kind::SelectorKind;
use crate::var_builder::Switches;
use crate::workspace::CHUNK_TOKENS_MAX;

/// How to run a stock model with its FFNs on flash.
#[derive(Clone, Debug)]
pub struct SparseOptions {
    /// The budget; `None` keeps everything in DRAM.
    pub memory: Option<Memory>,
    /// Who chooses neurons; by default what uses the folder's predictors, and `Dense` where it has none.
    pub selector: Option<SelectorKind>,
    /// What selectors with a density keep.
    pub dip: DipOptions,
    /// The dtype that the model will compute in, F32 or F16: what candle holds itself, an embedding above all, is of it.
    pub dtype: DType,
    /// The activation of the struct's FFNs; by default what its config says, and what candle's Llama and Falcon have whatever it
    /// says. Each forward checks it.
    pub activation: Option<Activation>,
    /// What the model allocates itself, for the budget: KV cache, activations, logits; as
    /// [`StockOptions::reserve_bytes`](crate::stock::StockOptions::reserve_bytes), and for a prompt of `n` tokens about
    /// `8 n * intermediate_size` bytes more, for what passes between candle and the store. Candle's quantized Llama keeps a mask of
    /// `n * (n + position)` bytes for each length of a prompt's piece and each position that one began at.
    pub reserve_bytes: u64,
    /// See [`Placement::window_tokens`](crate::Placement::window_tokens).
    pub window_tokens: Option<usize>,
    /// Which neuron leaves when its slot is wanted.
    pub cache_policy: CachePolicy,
    /// What is switched off and on, to see what it brings.
    pub switches: Switches,
}

impl Default for SparseOptions {
    fn default() -> Self {
        Self {
            memory: None,
            selector: None,
            dip: DipOptions::default(),
            dtype: DType::F32,
            activation: None,
            reserve_bytes: 64 << 20,
            window_tokens: None,
            cache_policy: CachePolicy::default(),
            switches: Switches::default(),
        }
    }
}

impl SparseOptions {
    /// Plans for the struct that `facts` are of, with this activation.
    pub(super) fn plan(
        &self,
        folder: &FlashFolder,
        facts: &StockFacts,
        activation: Activation,
    ) -> Result<BudgetPlan> {
        if !matches!(self.dtype, DType::F32 | DType::F16) {
            let reason = format!(
                "a dtype of {:?} is not supported here, F32 and F16 are",
                self.dtype
            );
            return Err(Error::Stock { reason });
        }
        let selector = SelectorKind::chosen(self.selector, folder, activation, self.dip)?;
        let layers = &folder.manifest().layers;
        let values = embeddings(folder).map(|(_, extent)| extent.shape.iter().product::<usize>());
        let candle_bytes = (values.sum::<usize>() * self.dtype.size_in_bytes()) as u64;
        let embedding = embeddings(folder).next().map(|(name, _)| name.clone());
        let needs = ModelNeeds {
            ctx: CHUNK_TOKENS_MAX,
            kv_position_bytes: 0,
            hidden_size: layers
                .iter()
                .map(|layer| layer.hidden_size)
                .max()
                .unwrap_or(0),
            token_values: 0,
            vocab_size: 0,
            embedding: embedding.unwrap_or_default(),
            head: match facts.kind {
                // A tied model has one tensor, which the embedding's bytes are.
                StructKind::Patched => HEAD.to_owned(),
                StructKind::QuantizedLlama => facts.head.clone(),
            },
        };
        let dense_bytes = folder.manifest().dense_weight_bytes.max(1) as f64;
        let memory = match self.memory {
            // The share is of all weights, those that candle holds included.
            Some(Memory::Percent(percent)) if percent < 100.0 => {
                let of_candle = 100.0 * candle_bytes as f64 / dense_bytes;
                Some(Memory::Percent((percent - of_candle).max(0.0)))
            }
            memory => memory,
        };
        let options = PlanOptions {
            memory,
            selector,
            window_tokens: self.window_tokens,
            process_bytes: 0,
            other_bytes: self
                .reserve_bytes
                .saturating_add(candle_bytes)
                .saturating_add(facts.rope_bytes),
        };
        let plan = BudgetPlan::for_machine(folder, &needs, options);
        plan.map_err(|error| self.with_candles(error, dense_bytes, candle_bytes))
    }

    /// An error about a share, of which candle's was taken, in numbers of what was asked for.
    fn with_candles(&self, error: Error, dense_bytes: f64, candle_bytes: u64) -> Error {
        match (error, self.memory) {
            (
                Error::BelowFloor {
                    floor_bytes,
                    breakdown,
                    ..
                },
                Some(Memory::Percent(percent)),
            ) => {
                let floor_bytes = floor_bytes.saturating_add(candle_bytes);
                let breakdown = format!(
                    "candle's embedding {}, {breakdown}",
                    HumanBytes(candle_bytes)
                );
                Error::below_share(percent, floor_bytes, dense_bytes as u64, breakdown)
            }
            (error, _) => error,
        }
    }
}
