//! Unmodified `candle_transformers` models whose FFNs run from flash, neurons selected.
//!
//! ```no_run
//! # use candle::{DType, Tensor}; use candle_wick::{FlashFolder, FlashVarBuilder, IoOptions, SparseOptions};
//! # struct Falcon; struct Config;
//! # impl Falcon {
//! #     fn load(_: candle_nn::VarBuilder, _: Config) -> candle::Result<Self> { Ok(Self) }
//! #     fn forward(&mut self, x: &Tensor) -> candle::Result<Tensor> { Ok(x.clone()) }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (config, input) = (Config, Tensor::zeros(1, DType::U32, &candle::Device::Cpu)?);
//! let folder = FlashFolder::open("falcon-7b.wick", IoOptions::default())?;
//! let options = SparseOptions { memory: Some("4GiB".parse()?), ..Default::default() };
//! let vb = FlashVarBuilder::for_stock(&folder, &options)?;
//! let mut falcon = Falcon::load(vb.sparse()?, config)?; // candle's own
//! let logits = vb.forward(|| falcon.forward(&input))?;
//! # Ok(()) }
//! ```
//!
//! Candle multiplies through the `gemm` crate, and wick-gemm stands in its place (`[patch.crates-io]`). The `VarBuilder` hands out
//! placeholders for the weights of linear layers, and products with them come here: those of gate, up and down run as one
//! [`FlashMlp`](crate::FlashMlp) (`ffn`), all others by rows through the same kernels as in our own definitions, in DRAM in the
//! stored dtype or streamed. The `FlashVarBuilder` owns what its placeholders stand for: it has to live as long as the model. Without
//! it candle says that dtypes differ.
//!
//! Candle's quantized Llama needs no patch: its weights may say themselves how they multiply (`ggml`).
//!
//! Not here: other models under a budget (`stock`), the place of gemm (`wick-gemm`).

#[cfg(feature = "wick-gemm")]
mod backend;
mod facts;
mod ffn;
mod ggml;
mod llama_shape;
mod options;
#[cfg(feature = "wick-gemm")]
mod patched;
#[cfg(feature = "wick-gemm")]
mod placeholder;
mod planned;
#[cfg(feature = "wick-gemm")]
mod running;
#[cfg(feature = "wick-gemm")]
mod store;
mod turns;

use std::sync::Arc;

use self::facts::StockFacts;
use self::ffn::SparseFfn;
use crate::budget::BudgetPlan;
use crate::error::Result;
use crate::folder::FlashFolder;
use crate::var_builder::{FlashVarBuilder, Placement};

pub use self::options::SparseOptions;
pub(crate) use self::planned::Planned;
#[cfg(feature = "wick-gemm")]
pub(crate) use self::store::Store;

impl FlashVarBuilder {
    /// The root of the tree for a stock model: plans the budget, with what candle keeps in DRAM itself.
    ///
    /// # Errors
    /// The budget is below the floor, the selector does not suit the folder, or the activation is unknown.
    pub fn for_stock(folder: &FlashFolder, options: &SparseOptions) -> Result<Self> {
        Self::planned_for(folder, StockFacts::of(folder)?, options)
    }

    fn planned_for(
        folder: &FlashFolder,
        facts: StockFacts,
        options: &SparseOptions,
    ) -> Result<Self> {
        let plan = options.plan(folder, &facts)?;
        let placement = Placement {
            dip: options.dip,
            cache_policy: options.cache_policy,
            switches: options.switches,
            ..plan.placement()
        };
        let planned = Planned::new(plan, facts, options);
        Ok(Self::with_plan(folder, placement, planned))
    }

    /// What is kept in DRAM of what was planned for, and what candle keeps there.
    pub fn stock_plan(&self) -> Option<&BudgetPlan> {
        self.planned()?.plan.as_ref()
    }

    fn load_ffns(&self, planned: &Planned) -> Result<Vec<Arc<SparseFfn>>> {
        let layers = &self.folder().manifest().layers;
        let mut ffns: Vec<Arc<SparseFfn>> = Vec::with_capacity(layers.len());
        for layer in layers {
            let (activation, tokens) = (planned.activation, planned.chunk_tokens);
            let ffn = SparseFfn::load(self, layer.clone(), activation, tokens)?;
            if let Some(before) = ffns.last() {
                before.look_ahead_to(&ffn);
            }
            ffns.push(Arc::new(ffn));
            wick_io::release_free_heap();
        }
        Ok(ffns)
    }
}

/// Whether the weight of this name is looked up by rows and not multiplied: candle has such tensors in DRAM whole.
pub(crate) fn is_embedding(name: &str) -> bool {
    name.contains("embed") || name.ends_with("wte.weight")
}
