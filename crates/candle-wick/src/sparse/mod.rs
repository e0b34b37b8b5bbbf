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
mod running;
mod store;

use std::sync::Arc;

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use wick_format::FfnLayer;

use self::backend::SparseBackend;
use self::ffn::SparseFfn;
use self::options::StockFacts;
use self::placeholder::{check_patch, Placeholder};
use crate::budget::BudgetPlan;
use crate::error::Result;
use crate::folder::FlashFolder;
use crate::linear::by_rows;
use crate::matrix::Matrix;
use crate::var_builder::{FlashVarBuilder, Placement};

pub use self::options::SparseOptions;
pub(crate) use self::store::Store;

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
        let store = Store::planned(plan, options);
        Ok(Self::with_store(folder, placement, store))
    }

    /// What [`Self::for_stock`] keeps in DRAM.
    pub fn stock_plan(&self) -> Option<&BudgetPlan> {
        self.store().plan.as_ref()
    }

    /// Candle's own `VarBuilder` over the folder, from its root, for structs that nobody changed: on the CPU, in the dtype that was
    /// planned for, or F32. Loads the FFNs. Structs built from the same `FlashVarBuilder` share their weights.
    ///
    /// # Errors
    /// Candle's products do not come here, or an FFN cannot be loaded.
    pub fn sparse(&self) -> Result<VarBuilder<'static>> {
        check_patch()?;
        let root = self.root();
        self.store().load(|| root.load_ffns())?;
        if let Some(plan) = self.stock_plan() {
            plan.prove_scratch();
        }
        let backend = Box::new(SparseBackend::new(root)?);
        Ok(VarBuilder::from_backend(
            backend,
            self.store().dtype,
            Device::Cpu,
        ))
    }

    fn load_ffns(&self) -> Result<Vec<Arc<SparseFfn>>> {
        let store = self.store();
        let activation = match store.activation {
            Some(activation) => activation,
            None => StockFacts::of(self.folder())?.activation,
        };
        let layers = &self.folder().manifest().layers;
        let mut ffns: Vec<Arc<SparseFfn>> = Vec::with_capacity(layers.len());
        for layer in layers {
            let ffn = SparseFfn::load(self, layer.clone(), activation, store.chunk_tokens)?;
            if let Some(before) = ffns.last() {
                before.look_ahead_to(&ffn);
            }
            ffns.push(Arc::new(ffn));
            wick_io::release_free_heap();
        }
        Ok(ffns)
    }

    /// Runs a forward pass of a stock model (or several). Those of several threads go one after the other. Whether it is a prompt's,
    /// which `dip` may compute dense, is what [`Self::set_prompt`] said last.
    ///
    /// Candle's matmul cannot give errors, so that products outside of this method are panics.
    ///
    /// # Errors
    /// `forward` failed, weights could not be read, an FFN is not what the folder says, or the model used a weight in another
    /// way than a linear layer does.
    pub fn forward<T: Send>(
        &self,
        forward: impl FnOnce() -> candle::Result<T> + Send,
    ) -> candle::Result<T> {
        self.store().forward(forward)
    }

    /// The tensor that stands for the weight `name`, of an FFN or of another linear layer.
    fn stand_in(
        &self,
        of_struct: usize,
        name: &str,
        shape: [usize; 2],
        dtype: DType,
    ) -> Result<Tensor> {
        let store = self.store();
        let uses = store.uses(Some(of_struct));
        let mut ffns = store.ffns().iter();
        let of_ffn = ffns.find_map(|ffn| Some((ffn.clone(), ffn.part(name)?)));
        let placeholder = if let Some((ffn, part)) = of_ffn {
            Placeholder::new(shape, dtype, uses, move |x, y| {
                ffn.product(part, x, y, dtype)
            })?
        } else {
            let matrix = self.shared_matrix(name, shape)?;
            let (name, [rows, columns]) = (name.to_owned(), shape);
            let tokens = store.chunk_tokens;
            Placeholder::new(shape, dtype, uses, move |x, y| {
                for (x, y) in x.chunks(tokens * columns).zip(y.chunks_mut(tokens * rows)) {
                    let got = by_rows(&matrix, x.len() / columns, x);
                    y.copy_from_slice(&got.map_err(|error| format!("{name}: {error}"))?);
                }
                Ok(())
            })?
        };
        Ok(store.keep(of_struct, name, placeholder))
    }

    /// A matrix outside the FFNs, in DRAM or streamed as the placement says; once for all structs.
    fn shared_matrix(&self, name: &str, shape: [usize; 2]) -> Result<Arc<Matrix>> {
        let mut tensors = self.store().tensors();
        if let Some(matrix) = tensors.matrices.get(name) {
            return Ok(matrix.clone());
        }
        let matrix = Arc::new(self.matrix(&shape, name)?);
        tensors.matrices.insert(name.to_owned(), matrix.clone());
        Ok(matrix)
    }

    /// The values of the embedding `name`; once for all structs.
    fn embedding(&self, name: &str, shape: [usize; 2], dtype: DType) -> Result<Tensor> {
        let uses = self.store().uses(None);
        let mut tensors = self.store().tensors();
        if let Some(placeholder) = tensors.embeddings.get(name) {
            return Ok(placeholder.tensor());
        }
        let matrix = Matrix::load(self.folder(), name, &shape, false)?;
        let placeholder = Placeholder::embedding(&matrix, shape, dtype, uses)?;
        let tensor = placeholder.tensor();
        tensors.embeddings.insert(name.to_owned(), placeholder);
        Ok(tensor)
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
