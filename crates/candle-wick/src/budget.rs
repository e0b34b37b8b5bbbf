//! The budget: what is kept in DRAM, decided before anything is loaded.
//!
//! `Memory::Bytes` bounds the peak of the whole process, page tables included; `Memory::Percent` bounds the weights in
//! DRAM (resident tensors, predictors, slots), and the sum with everything else is the contract then.
//!
//! What a process has already (code, tokenizer, threads), vectors, predictors, KV, scratch, the stream ring and the
//! page tables of all that come first; then one pass of slots for each layer. The head, then attention matrices,
//! stay on flash when they do not fit beside that. What is left over becomes slots, shared out by the layers'
//! need.
//!
//! Invariants:
//! - `total_bytes <= budget`, and every later allocation of a model's size is one of `lines`;
//! - each layer has at least one pass of slots, at most one slot a neuron; a layer that goes by columns has two caches, and
//!   that holds for each of them.
//!
//! Not here: allocating, the plan as text (`plan_text`).

use std::collections::BTreeSet;

use serde::Serialize;
use wick_format::{FfnLayer, Layout, NeuronOrder};

use crate::dip::DipOptions;
use crate::error::{Error, Result};
use crate::eviction_order::CachePolicy;
use crate::folder::FlashFolder;
use crate::memory::{HumanBytes, Memory};
use crate::predictor_kind::PredictorForm;
use crate::pruning::pruning_workspace_bytes;
use crate::selector_kind::SelectorKind;
use crate::var_builder::{Placement, Switches};
use crate::weights::{all_slot_bytes, slots_floor_bytes, slots_need, streamable, Cached, Weights};
use crate::workspace::{column_workspace_bytes, workspace_bytes, CHUNK_TOKENS_MAX};

/// Pages that a process still touches after planning, whatever the model: code and read-only data that the
/// forward pass runs through, stacks of its threads, small allocations.
const LATER_PAGES_BYTES: u64 = 4 << 20;
const SLOTS_LABEL: &str = "slots";
const PAGE_TABLES_LABEL: &str = "page tables";
const OTHER_LABEL: &str = "candle (embedding, KV cache, activations)";
/// Prompt tokens computed together: the first that fits.
const CHUNK_TOKENS: [usize; 3] = [CHUNK_TOKENS_MAX, 32, 8];
/// Copies of the logits while they are computed, a position each: by row, by token, as handed out.
const LOGITS_COPIES: usize = 3;
/// Copies of one position's logits while a token is sampled from them: scaled, weighted, sorted.
const SAMPLING_COPIES: usize = 6;

/// The kernel's page tables, which a cgroup counts: 8 bytes for each page of 4 KiB, large pages included, for which it
/// keeps them in reserve.
fn page_table_bytes(resident_bytes: u64) -> u64 {
    resident_bytes / 512
}

/// What `resident_bytes` take with their page tables: the least sum whose [`page_table_bytes`] leave room for them.
fn with_page_tables(resident_bytes: u64) -> u64 {
    resident_bytes.saturating_add(resident_bytes / 511 + 1)
}

/// Ends `lines` with their page tables and gives the sum of all.
fn with_page_tables_line(lines: &mut Vec<PlanLine>) -> u64 {
    lines.retain(|line| line.label != PAGE_TABLES_LABEL);
    let bytes = lines.iter().map(|line| line.bytes);
    let resident_bytes = bytes.fold(0, u64::saturating_add);
    let total_bytes = with_page_tables(resident_bytes);
    lines.push(PlanLine {
        label: PAGE_TABLES_LABEL,
        bytes: total_bytes - resident_bytes,
    });
    total_bytes
}

/// Longer chunks of a prompt may take one in so many bytes from the weights for their scratch.
const CHUNK_COST_SHARE: u64 = 20;

/// Positions whose logits are computed together, in prompts of `chunk_tokens`.
fn logits_tokens(chunk_tokens: usize) -> usize {
    (chunk_tokens / 16).max(1)
}

/// What a model needs besides its weights, and which tensors play a part of their own.
#[derive(Clone, Debug)]
pub struct ModelNeeds {
    /// Positions that the KV cache holds.
    pub ctx: usize,
    /// Bytes of one position over all layers.
    pub kv_position_bytes: u64,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// f32 values that one token has in flight at most, outside the FFN.
    pub token_values: usize,
    /// Logits of one position.
    pub vocab_size: usize,
    /// The token embedding's tensor.
    pub embedding: String,
    /// The head's tensor; the embedding's in a tied model.
    pub head: String,
}

/// How to spend the budget.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// The bound; `None` keeps everything in DRAM.
    pub memory: Option<Memory>,
    /// Who chooses the neurons.
    pub selector: SelectorKind,
    /// See [`Placement::window_tokens`].
    pub window_tokens: Option<usize>,
    /// What the process holds before anything is loaded, the opened folder's ring included.
    pub process_bytes: u64,
    /// What others will allocate for the model: candle, where the struct is its own.
    pub other_bytes: u64,
}

/// One item of the budget.
#[derive(Clone, Debug, Serialize)]
pub struct PlanLine {
    /// What it is.
    pub label: &'static str,
    /// How much it takes.
    pub bytes: u64,
}

/// What will be in DRAM.
#[derive(Clone, Debug, Serialize)]
pub struct BudgetPlan {
    /// The contract: what was asked for in bytes, or the sum of a plan by percent.
    pub budget_bytes: u64,
    /// The sum of `lines`.
    pub total_bytes: u64,
    /// The smallest budget that works for this model, context and selector.
    pub floor_bytes: u64,
    /// Weights in DRAM: resident tensors, predictors, slots.
    pub weight_bytes: u64,
    /// All weights of the dense model.
    pub dense_weight_bytes: u64,
    /// The items.
    pub lines: Vec<PlanLine>,
    /// Slots of each layer: for neurons, or for down columns where layers go by columns.
    pub slots_per_layer: Vec<usize>,
    /// Slots for channels of each layer, where layers go by columns.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub channel_slots_per_layer: Vec<usize>,
    /// Matrices read from flash whenever they are used.
    pub streamed: Vec<String>,
    /// Prompt tokens computed together.
    pub chunk_tokens: usize,
    /// Positions of the KV cache.
    pub ctx: usize,
    /// Who chooses the neurons.
    #[serde(serialize_with = "as_text")]
    pub selector: SelectorKind,
    /// See [`Placement::window_tokens`].
    pub window_tokens: Option<usize>,
    /// Scratch to be proven available at load.
    scratch_bytes: u64,
}

fn as_text<S: serde::Serializer>(
    kind: &SelectorKind,
    to: S,
) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(kind.name())
}

/// Everything but slots and streamable matrices.
struct Fixed {
    process: u64,
    other: u64,
    kv: u64,
    scratch: u64,
    ring: u64,
    books: u64,
    vectors: u64,
    predictors: u64,
    chunk_tokens: usize,
}

impl Fixed {
    fn of(
        folder: &FlashFolder,
        needs: &ModelNeeds,
        options: &PlanOptions,
        chunk_tokens: usize,
    ) -> Self {
        let layers = &folder.manifest().layers;
        let ffn = layers
            .iter()
            .map(|layer| layer.intermediate_size)
            .max()
            .unwrap_or(0);
        let chunk = chunk_tokens.min(needs.ctx);
        let logits = logits_tokens(chunk) * LOGITS_COPIES + SAMPLING_COPIES;
        let activations = 4 * (chunk * needs.token_values + logits * needs.vocab_size) as u64;
        let hidden = needs.hidden_size;
        let rank = match options.selector.form() {
            Some(PredictorForm::LowRank) => folder.predictor_rank_max(),
            _ => 0,
        };
        let more = match options.selector {
            selector if selector.reads_columns(folder) => {
                column_workspace_bytes(chunk, hidden, ffn)
            }
            selector if selector.is_pruning() => pruning_workspace_bytes(chunk, ffn),
            _ => 0,
        };
        let steps = workspace_bytes(chunk, hidden, ffn.max(hidden), rank) + more;
        let caches = Cached::of(folder, options.selector);
        Self {
            process: options.process_bytes.saturating_sub(folder.ring_bytes()) + LATER_PAGES_BYTES,
            other: options.other_bytes,
            kv: needs.kv_position_bytes.saturating_mul(needs.ctx as u64),
            scratch: activations + steps,
            ring: folder.ring_bytes() + folder.bounce_bytes(),
            books: caches.iter().map(Cached::books_bytes).sum::<u64>()
                + layers.iter().map(order_bytes).sum::<u64>(),
            vectors: folder
                .resident_tensors()
                .filter(|(_, extent)| extent.shape.len() < 2)
                // Norms and biases are kept as f32, and checked in their stored form before.
                .map(|(_, extent)| 4 * extent.shape.iter().product::<usize>() as u64)
                .sum(),
            predictors: match options.selector.form() {
                Some(_) => folder.predictor_bytes(),
                None => 0,
            },
            chunk_tokens,
        }
    }

    fn besides_weights(&self) -> u64 {
        // The KV of a hostile config may be anything.
        let known = self.process + self.scratch + self.ring + self.books;
        known.saturating_add(self.kv).saturating_add(self.other)
    }

    fn weights(&self) -> u64 {
        self.vectors + self.predictors
    }
}

/// The order of one layer.
fn order_bytes(layer: &FfnLayer) -> u64 {
    match layer.layout {
        Layout::Permuted => NeuronOrder::len_bytes(layer.intermediate_size),
        Layout::Neuron | Layout::Channel | Layout::Both => 0,
    }
}

impl BudgetPlan {
    /// Plans; an error names the floor and what makes it up when the budget is below it.
    pub fn new(folder: &FlashFolder, needs: &ModelNeeds, options: &PlanOptions) -> Result<Self> {
        let matrices = streamable(folder, needs);
        let caches = Cached::of(folder, options.selector);
        let slots_floor = slots_floor_bytes(&caches);
        let records = caches.iter().map(|cached| cached.slot_bytes(cached.count));
        let all_bytes =
            matrices.iter().map(|(_, bytes)| *bytes).sum::<u64>() + records.sum::<u64>();
        let smallest = Fixed::of(folder, needs, options, CHUNK_TOKENS[CHUNK_TOKENS.len() - 1]);
        let weights_floor = smallest.weights() + slots_floor;
        let resident_floor = smallest.besides_weights().saturating_add(weights_floor);
        let floor_bytes = with_page_tables(resident_floor);
        let dense_weight_bytes = folder.manifest().dense_weight_bytes;
        let fitting = |weights_of: &dyn Fn(&Fixed) -> Option<u64>| {
            let candidates = CHUNK_TOKENS
                .iter()
                .map(|chunk| Fixed::of(folder, needs, options, *chunk));
            let mut fitting = candidates.filter_map(|fixed| Some((weights_of(&fixed)?, fixed)));
            fitting.find(|(weights, fixed)| *weights >= fixed.weights() + slots_floor)
        };
        let (weights_budget, fixed) = match options.memory {
            None => fitting(&|_| Some(u64::MAX)),
            // Padding, predictors and f32 norms come on top of the dense model's bytes: all means all.
            Some(Memory::Percent(percent)) if percent >= 100.0 => fitting(&|_| Some(u64::MAX)),
            Some(Memory::Bytes(bytes)) => {
                let resident_bytes = bytes - page_table_bytes(bytes);
                let left = |fixed: &Fixed| resident_bytes.checked_sub(fixed.besides_weights());
                let of_use = |weights: u64| weights.min(smallest.weights() + all_bytes);
                let most = left(&smallest).map_or(0, of_use);
                // Otherwise more budget would mean longer chunks, fewer weights and slower tokens.
                let is_worth_it = |weights: &u64| {
                    let weights = of_use(*weights);
                    most.saturating_sub(weights) <= weights / CHUNK_COST_SHARE
                };
                fitting(&|fixed| left(fixed).filter(is_worth_it))
            }
            Some(Memory::Percent(percent)) => {
                fitting(&|_| Some((dense_weight_bytes as f64 * percent / 100.0) as u64))
            }
        }
        .ok_or_else(|| {
            below_floor(
                &smallest,
                slots_floor,
                floor_bytes,
                dense_weight_bytes,
                options,
            )
        })?;
        let need = slots_need(folder, options.selector, &caches);
        let weights = Weights::choose(&caches, &matrices, weights_budget - fixed.weights(), &need);
        Ok(Self::sum_up(
            folder,
            needs,
            options,
            fixed,
            weights,
            floor_bytes,
        ))
    }

    fn sum_up(
        folder: &FlashFolder,
        needs: &ModelNeeds,
        options: &PlanOptions,
        fixed: Fixed,
        weights: Weights,
        floor_bytes: u64,
    ) -> Self {
        let lines = [
            ("process (code, tokenizer, threads)", fixed.process),
            (OTHER_LABEL, fixed.other),
            ("resident matrices", weights.resident_bytes),
            ("norms and biases", fixed.vectors),
            ("predictors", fixed.predictors),
            (SLOTS_LABEL, weights.slot_bytes),
            ("checksums and cache books", fixed.books),
            ("KV cache", fixed.kv),
            ("stream ring", fixed.ring),
            ("scratch", fixed.scratch),
        ];
        let mut lines: Vec<PlanLine> = lines
            .into_iter()
            .map(|(label, bytes)| PlanLine { label, bytes })
            .collect();
        lines.retain(|line| line.label != OTHER_LABEL || line.bytes > 0);
        let total_bytes = with_page_tables_line(&mut lines);
        let mut slots_per_layer = weights.slots;
        let channel_slots_per_layer = slots_per_layer.split_off(folder.manifest().layers.len());
        Self {
            budget_bytes: match options.memory {
                Some(Memory::Bytes(bytes)) => bytes,
                _ => total_bytes,
            },
            total_bytes,
            floor_bytes,
            weight_bytes: fixed.weights() + weights.resident_bytes + weights.slot_bytes,
            dense_weight_bytes: folder.manifest().dense_weight_bytes,
            lines,
            slots_per_layer,
            channel_slots_per_layer,
            streamed: weights.streamed,
            chunk_tokens: fixed.chunk_tokens.min(needs.ctx),
            ctx: needs.ctx,
            selector: options.selector,
            window_tokens: options.window_tokens,
            scratch_bytes: fixed.scratch,
        }
    }

    /// The same plan with exactly `slots` slots in each layer (as far as it has neurons), or in each of its two caches,
    /// whatever the budget: for measuring what slots are worth.
    pub fn with_slots(mut self, folder: &FlashFolder, slots: usize) -> Self {
        let caches = Cached::of(folder, self.selector);
        let slots = caches.iter().map(|cached| slots.max(2).min(cached.count));
        let mut slots: Vec<usize> = slots.collect();
        let bytes = all_slot_bytes(&caches, &slots);
        self.channel_slots_per_layer = slots.split_off(folder.manifest().layers.len());
        self.slots_per_layer = slots;
        let line = self.lines.iter_mut().find(|line| line.label == SLOTS_LABEL);
        let before = line.map_or(0, |line| std::mem::replace(&mut line.bytes, bytes));
        self.total_bytes = with_page_tables_line(&mut self.lines);
        self.budget_bytes = self.total_bytes;
        self.weight_bytes = self.weight_bytes - before + bytes;
        self
    }

    /// Whether layers are multiplied by columns, and have two caches each.
    pub fn goes_by_columns(&self) -> bool {
        !self.channel_slots_per_layer.is_empty()
    }

    /// Positions whose logits fit into the scratch together.
    pub fn logits_tokens(&self) -> usize {
        logits_tokens(self.chunk_tokens)
    }

    /// What the layers need to know of the plan.
    pub fn placement(&self) -> Placement {
        Placement {
            selector: self.selector,
            dip: DipOptions::default(),
            slots_per_layer: self.slots_per_layer.clone(),
            channel_slots_per_layer: self.channel_slots_per_layer.clone(),
            window_tokens: self.window_tokens,
            cache_policy: CachePolicy::default(),
            streamed: self.streamed.iter().cloned().collect::<BTreeSet<_>>(),
            switches: Switches::default(),
            trace: None,
        }
    }

    /// Takes the planned scratch once and gives it back, so that a machine that cannot provide it says so now
    /// and not in the middle of an answer.
    pub fn prove_scratch(&self) {
        // Any value but zero: zeroed memory would come from the system untouched.
        std::hint::black_box(vec![1u8; self.scratch_bytes as usize]);
    }
}

fn below_floor(
    fixed: &Fixed,
    slots_floor: u64,
    floor_bytes: u64,
    dense_weight_bytes: u64,
    options: &PlanOptions,
) -> Error {
    let parts = [
        ("process", fixed.process),
        (OTHER_LABEL, fixed.other),
        (PAGE_TABLES_LABEL, page_table_bytes(floor_bytes)),
        ("KV cache", fixed.kv),
        ("scratch", fixed.scratch),
        ("stream ring", fixed.ring),
        ("checksums and cache books", fixed.books),
        ("norms and biases", fixed.vectors),
        ("predictors", fixed.predictors),
        ("one pass of slots", slots_floor),
    ];
    let listed = |parts: &[(&str, u64)]| {
        let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
        let listed = parts.map(|(label, bytes)| format!("{label} {}", HumanBytes(*bytes)));
        listed.collect::<Vec<_>>().join(", ")
    };
    match options.memory {
        Some(Memory::Percent(percent)) => {
            let weights_floor = fixed.weights() + slots_floor;
            Error::below_share(
                percent,
                weights_floor,
                dense_weight_bytes,
                listed(&parts[7..]),
            )
        }
        Some(Memory::Bytes(bytes)) => Error::below_floor(bytes, floor_bytes, listed(&parts)),
        None => Error::below_floor(u64::MAX, floor_bytes, listed(&parts)),
    }
}
