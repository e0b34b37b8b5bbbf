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
//! Candle multiplies through the `gemm` crate, and wick-gemm stands in its place
//! (`[patch.crates-io]`). The `VarBuilder` hands out placeholders for the weights of linear layers, and products with them come
//! here: those of gate, up and down run as one [`FlashMlp`](crate::FlashMlp) (`ffn`), all others as a
//! [`FlashLinear`](crate::FlashLinear), in DRAM in the stored dtype or streamed.
//!
//! The `FlashVarBuilder` owns what its placeholders stand for: it has to live as long as the model. Without it candle says that
//! dtypes differ.
//!
//! Not here: other models under a budget (`stock`), the place of gemm (`wick-gemm`).

mod backend;
mod ffn;
mod options;
mod placeholder;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use gemm::wick::catching;
use wick_format::FfnLayer;

use self::backend::SparseBackend;
use self::ffn::{forget_begun, SparseFfn};
use self::options::StockFacts;
use self::placeholder::Placeholder;
use crate::activation::Activation;
use crate::budget::BudgetPlan;
use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::matrix::Matrix;
use crate::pool::{with_awake_threads, ComputePool};
use crate::var_builder::{FlashVarBuilder, Placement};
use crate::workspace::CHUNK_TOKENS_MAX;

pub use self::options::SparseOptions;

thread_local! {
    /// The address of what the thread's innermost forward is of.
    static RUNNING: Cell<usize> = const { Cell::new(0) };
}

/// Notes that a forward runs on this thread, also when it ends by a panic; nothing that was begun before counts in it.
struct Running {
    before: usize,
}

impl Running {
    fn new(sparse: usize) -> Self {
        forget_begun();
        Self {
            before: RUNNING.replace(sparse),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        forget_begun();
        RUNNING.set(self.before);
    }
}

/// What the clones of a `FlashVarBuilder` share for stock models.
pub(crate) struct Sparse {
    plan: Option<BudgetPlan>,
    activation: Option<Activation>,
    /// Tokens of one step.
    chunk_tokens: usize,
    ffns: OnceLock<Vec<Arc<SparseFfn>>>,
    /// The threads of its forwards, which go one after the other: a thread that waits for its products must not begin another
    /// forward.
    pool: OnceLock<ComputePool>,
    turn: Mutex<()>,
    placeholders: Mutex<HashMap<(String, DType), Placeholder>>,
}

impl Default for Sparse {
    fn default() -> Self {
        Self {
            plan: None,
            activation: None,
            chunk_tokens: CHUNK_TOKENS_MAX,
            ffns: OnceLock::new(),
            pool: OnceLock::new(),
            turn: Mutex::new(()),
            placeholders: Mutex::default(),
        }
    }
}

impl Sparse {
    fn placeholders(&self) -> MutexGuard<'_, HashMap<(String, DType), Placeholder>> {
        self.placeholders
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl FlashVarBuilder {
    /// The root of the tree for a stock model: plans the budget, with what candle keeps in DRAM itself.
    ///
    /// # Errors
    /// The budget is below the floor, the selector does not suit the folder, or the activation is unknown.
    pub fn for_stock(folder: &FlashFolder, options: &SparseOptions) -> Result<Self> {
        let facts = StockFacts::of(folder)?;
        let plan = options.plan(folder, &facts)?;
        let placement = Placement {
            dip: options.dip,
            cache_policy: options.cache_policy,
            switches: options.switches,
            ..plan.placement()
        };
        let sparse = Sparse {
            activation: options.activation,
            chunk_tokens: plan.chunk_tokens,
            plan: Some(plan),
            ..Sparse::default()
        };
        Ok(Self::with_sparse(folder, placement, sparse))
    }

    /// What [`Self::for_stock`] keeps in DRAM.
    pub fn stock_plan(&self) -> Option<&BudgetPlan> {
        self.sparse_state().plan.as_ref()
    }

    /// Candle's own `VarBuilder` over the folder, from its root, for structs that nobody changed: in f32 on the CPU, or in f16 with
    /// `to_dtype`. Loads the FFNs. Models built from the same `FlashVarBuilder` share their weights.
    ///
    /// # Errors
    /// Candle's products do not come here, or an FFN cannot be loaded.
    pub fn sparse(&self) -> Result<VarBuilder<'static>> {
        placeholder::check_patch()?;
        if self.sparse_state().ffns.get().is_none() {
            let (pool, loaded) = (ComputePool::new()?, self.load_ffns()?);
            let _was_first = self.sparse_state().pool.set(pool);
            let _was_first = self.sparse_state().ffns.set(loaded);
        }
        let backend = Box::new(SparseBackend::new(self.clone())?);
        Ok(VarBuilder::from_backend(backend, DType::F32, Device::Cpu))
    }

    fn load_ffns(&self) -> Result<Vec<Arc<SparseFfn>>> {
        let sparse = self.sparse_state();
        let activation = match sparse.activation {
            Some(activation) => activation,
            None => StockFacts::of(self.folder())?.activation,
        };
        let layers = &self.folder().manifest().layers;
        let mut ffns: Vec<Arc<SparseFfn>> = Vec::with_capacity(layers.len());
        for layer in layers {
            let ffn = SparseFfn::load(self, layer.clone(), activation, sparse.chunk_tokens)?;
            if let Some(before) = ffns.last() {
                before.look_ahead_to(&ffn);
            }
            ffns.push(Arc::new(ffn));
        }
        Ok(ffns)
    }

    /// Runs a forward pass of a stock model (or several). Those of several threads go one after the other.
    ///
    /// Candle's matmul cannot give the errors of what stands in for it: outside of this method they are panics.
    ///
    /// # Errors
    /// `forward` failed, weights could not be read, an FFN is not what the folder says, or the model used a weight in another
    /// way than a linear layer does.
    pub fn forward<T: Send>(
        &self,
        forward: impl FnOnce() -> candle::Result<T> + Send,
    ) -> candle::Result<T> {
        let sparse = self.sparse_state();
        let this = std::ptr::from_ref(sparse) as usize;
        if RUNNING.get() == this {
            return forward(); // inside of another one of its own
        }
        let caught = || {
            let _running = Running::new(this);
            catching(|| with_awake_threads(forward))
        };
        let (result, failure) = match sparse.pool.get() {
            Some(pool) => {
                let _turn = sparse.turn.lock().unwrap_or_else(PoisonError::into_inner);
                pool.run(caught)
            }
            None => caught(),
        };
        if let Some(reason) = failure {
            return Err(Error::Stock { reason }.into());
        }
        let result = result?;
        let placeholders = self.sparse_state().placeholders();
        let unused = placeholders.iter().find(|(_, weight)| !weight.was_used());
        match unused {
            None => Ok(result),
            Some(((name, _), _)) => {
                let reason = format!(
                    "{name} was not multiplied: the model uses this weight in another way than a linear layer does, and saw zeros"
                );
                Err(Error::Stock { reason }.into())
            }
        }
    }

    /// The tensor that stands for the weight `name`, of an FFN or of another linear layer.
    fn stand_in(&self, name: &str, shape: [usize; 2], dtype: DType) -> Result<Tensor> {
        let key = (name.to_owned(), dtype);
        if let Some(placeholder) = self.sparse_state().placeholders().get(&key) {
            return Ok(placeholder.tensor());
        }
        let ffns = self
            .sparse_state()
            .ffns
            .get()
            .map_or(&[][..], Vec::as_slice);
        let of_ffn = ffns.iter().find_map(|ffn| Some((ffn, ffn.part(name)?)));
        let placeholder = match of_ffn {
            Some((ffn, part)) => {
                let (ffn, tolerance) = (ffn.clone(), ffn::tolerance(dtype));
                Placeholder::new(shape, dtype, move |x, y| ffn.product(part, x, y, tolerance))?
            }
            None => {
                let linear = self.linear_rows(name, shape)?;
                let (name, chunk) = (name.to_owned(), self.sparse_state().chunk_tokens * shape[1]);
                Placeholder::new(shape, dtype, move |x, y| {
                    let y = y.chunks_mut(chunk / shape[1] * shape[0]);
                    for (x, y) in x.chunks(chunk).zip(y) {
                        let got = linear(x).map_err(|error| format!("{name}: {error}"))?;
                        y.copy_from_slice(&got);
                    }
                    Ok(())
                })?
            }
        };
        let tensor = placeholder.tensor();
        self.sparse_state().placeholders().insert(key, placeholder);
        Ok(tensor)
    }

    /// The values of the embedding `name`.
    fn embedding(&self, name: &str, shape: [usize; 2], dtype: DType) -> Result<Tensor> {
        let key = (format!("{name} by rows"), dtype);
        if let Some(placeholder) = self.sparse_state().placeholders().get(&key) {
            return Ok(placeholder.tensor());
        }
        let matrix = Matrix::load(self.folder(), name, &shape, false)?;
        let placeholder = Placeholder::embedding(&matrix, shape, dtype)?;
        let tensor = placeholder.tensor();
        self.sparse_state().placeholders().insert(key, placeholder);
        Ok(tensor)
    }

    /// What multiplies rows of x with the weight `name` `(out_dim, in_dim)` outside the FFNs.
    fn linear_rows(
        &self,
        name: &str,
        shape: [usize; 2],
    ) -> Result<impl Fn(&[f32]) -> Result<Vec<f32>>> {
        let matrix = self.matrix(&shape, name)?;
        Ok(move |x: &[f32]| crate::linear::by_rows(&matrix, x.len() / shape[1], x))
    }
}

/// Whether the weight of this name is looked up by rows and not multiplied: candle has such tensors in DRAM whole.
pub(crate) fn is_embedding(name: &str) -> bool {
    name.contains("embed") || name.ends_with("wte.weight")
}

/// The layer as a stock struct has it, which adds the biases of linear layers itself.
fn without_down_bias(layer: FfnLayer) -> FfnLayer {
    FfnLayer {
        down_bias: None,
        ..layer
    }
}
