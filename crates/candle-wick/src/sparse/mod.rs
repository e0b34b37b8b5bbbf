//! Unmodified `candle_transformers` models whose FFNs run from flash, neurons selected.
//!
//! A struct's weights are stand-ins that pass products on: those of gate, up and down run as one [`FlashMlp`](crate::FlashMlp)
//! (`ffn`), all others by rows through the same kernels as in our own definitions, in DRAM in the stored dtype or streamed.
//! Two kinds of weights can do so: any, where wick-gemm stands in the place of gemm (`patched`), and those of candle's
//! quantized Llama, which say themselves how they multiply (`ggml`).
//!
//! Not here: other models under a budget (`stock`), the place of gemm (`wick-gemm`).

mod facts;
mod ffn;
mod ggml;
mod llama_shape;
mod options;
#[cfg(feature = "wick-gemm")]
mod patched;
mod setup;
mod turns;

use std::sync::Arc;

use self::facts::StockFacts;
use self::ffn::SparseFfn;
use crate::budget::BudgetPlan;
use crate::error::Result;
use crate::folder::FlashFolder;
use crate::linear::by_rows;
use crate::matrix::Matrix;
use crate::var_builder::{FlashVarBuilder, Placement};

pub use self::options::SparseOptions;
#[cfg(feature = "wick-gemm")]
pub(crate) use self::patched::Store;
pub(crate) use self::setup::StockSetup;

impl FlashVarBuilder {
    /// The root of the tree for the struct that `facts` are of: plans the budget.
    fn for_struct(
        folder: &FlashFolder,
        facts: StockFacts,
        options: &SparseOptions,
    ) -> Result<Self> {
        let activation = facts.activation_for(folder, options.activation)?;
        let plan = options.plan(folder, &facts, activation)?;
        let placement = Placement {
            dip: options.dip,
            cache_policy: options.cache_policy,
            switches: options.switches,
            ..plan.placement()
        };
        let setup = StockSetup::planned(plan, facts, activation, options);
        Ok(Self::with_setup(folder, placement, setup))
    }

    /// What a stock model keeps in DRAM, by `for_stock` or [`Self::for_quantized_llama`].
    pub fn stock_plan(&self) -> Option<&BudgetPlan> {
        self.setup()?.plan.as_ref()
    }

    fn load_ffns(&self, setup: &StockSetup) -> Result<Vec<Arc<SparseFfn>>> {
        let layers = &self.folder().manifest().layers;
        let mut ffns: Vec<Arc<SparseFfn>> = Vec::with_capacity(layers.len());
        for layer in layers {
            let (activation, tokens) = (setup.activation, setup.chunk_tokens);
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

/// `y` `(tokens, rows)` of `x` `(tokens, columns)` and the matrix `name`, in steps of up to `chunk_tokens`; or why not.
fn linear_product(
    (name, matrix): (&str, &Matrix),
    chunk_tokens: usize,
    x: &[f32],
    y: &mut [f32],
) -> std::result::Result<(), String> {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    let chunks = x.chunks(chunk_tokens * columns);
    for (x, y) in chunks.zip(y.chunks_mut(chunk_tokens * rows)) {
        let got = by_rows(matrix, x.len() / columns, x);
        y.copy_from_slice(&got.map_err(|error| format!("{name}: {error}"))?);
    }
    Ok(())
}

/// Whether the tensor of this name is added to what a layer gives.
fn is_bias(name: &str) -> bool {
    name.ends_with(".bias")
}

/// Whether the weight of this name is looked up by rows and not multiplied: candle has such tensors in DRAM whole.
pub(crate) fn is_embedding(name: &str) -> bool {
    name.contains("embed") || name.ends_with("wte.weight")
}
