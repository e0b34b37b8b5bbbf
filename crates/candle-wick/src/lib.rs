//! Candle layers whose feed-forward weights stay on flash.
//!
//! A converted folder ([`FlashFolder`]) holds a model's FFN as one record a neuron. [`FlashMlp`] reads the
//! records that a token needs into a cache of slots and multiplies only those; it is a `candle_nn::Module`.
//! [`FlashLinear`] and [`FlashEmbedding`] keep their weight in DRAM or stream it, as the [`BudgetPlan`] says.
//! [`FlashVarBuilder`] leads to all of them by the names of the Hugging Face checkpoint.
//!
//! Not here: the format of the folder (`wick-format`), reading (`wick-io`), products (`wick-kernels`), whole
//! models (`candle-wick-models`), making folders (`candle-wick-convert`).
#![forbid(unsafe_code)]

mod activation;
mod ahead;
mod alibi;
mod budget;
mod column_cache;
mod dip;
mod embedding;
mod error;
mod eviction_order;
mod folder;
mod io_options;
mod kv_cache;
mod linear;
mod lookahead;
mod low_rank;
mod machine_plan;
mod matrix;
mod memory;
mod mlp;
mod neuron_cache;
mod neurons;
mod plan_text;
mod pool;
mod predictor;
mod predictor_file;
mod predictor_kind;
mod predictors;
mod pruning;
mod quantised_gate;
mod recorded_trace;
mod records;
mod residuals;
mod rows;
mod selection;
mod selector;
mod selector_kind;
mod sparse;
mod stats;
mod step;
pub mod stock;
mod stored;
mod trace;
mod trace_recorder;
mod var_builder;
mod weights;
mod workspace;

pub use activation::Activation;
pub use alibi::Alibi;
pub use budget::{BudgetPlan, ModelNeeds, PlanLine, PlanOptions};
pub use dip::DipOptions;
pub use embedding::FlashEmbedding;
pub use error::{Error, Result};
pub use eviction_order::CachePolicy;
pub use folder::{open_indexed, FlashFolder, MANIFEST_FILE, PREDICTORS_FILE, RESIDENT_FILE};
pub use io_options::IoOptions;
pub use kv_cache::KvCache;
pub use linear::FlashLinear;
pub use lookahead::Lookahead;
pub use memory::{HumanBytes, Memory};
pub use mlp::{FlashMlp, MlpTicket};
pub use neuron_cache::{NeuronCache, StepPlan, PASS_NEURONS};
pub use pool::{with_awake_threads, ComputePool};
pub use predictor::Predictor;
pub use predictor_kind::{Between, PredictorForm, PredictorInput};
pub use predictors::{PredictorMetadata, WindowShares, WINDOW_TOKENS};
pub use recorded_trace::{LayerTrace, RecordedTrace, TraceMetadata};
pub use residuals::Residuals;
pub use selector_kind::SelectorKind;
pub use sparse::SparseOptions;
pub use stats::{FfnStats, MatrixStats};
pub use trace::{ActivityTrace, TraceFigures};
pub use trace_recorder::TraceRecorder;
pub use var_builder::{FlashVarBuilder, Placement, Switches};
pub use wick_format::ColumnKind;
pub use wick_io::{
    available_memory_bytes, current_rss_bytes, peak_rss_bytes, release_free_heap, share_one_heap,
    DirectIo, Engine, IoCounters, IoMode, SlowDiskOptions,
};
pub use workspace::PASS_NEURONS_MAX;
pub use workspace::{FfnRecorder, SelectionRecorder};
