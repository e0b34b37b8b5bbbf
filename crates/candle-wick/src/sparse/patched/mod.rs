//! Stock structs through the place of gemm: placeholders in the `VarBuilder`, products in a forward.
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
//! Candle multiplies through the `gemm` crate, and wick-gemm stands in its place (`[patch.crates-io]`). The `FlashVarBuilder`
//! owns what its placeholders stand for: it has to live as long as the model. Without it candle says that dtypes differ.

mod backend;
mod placeholder;
mod running;
mod store;

use std::sync::Arc;

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;

use self::backend::SparseBackend;
use self::placeholder::{check_patch, Placeholder};
use super::facts::{read_config, StockFacts, StructKind};
use super::ffn::ffn_of;
use super::linear_product;
use super::options::SparseOptions;
use super::setup::StockSetup;
use crate::error::Result;
use crate::folder::FlashFolder;
use crate::matrix::Matrix;
use crate::var_builder::{FfnPart, FlashVarBuilder};

pub(crate) use self::store::Store;

impl FlashVarBuilder {
    /// The root of the tree for a stock model: plans the budget, with what candle keeps in DRAM itself.
    ///
    /// # Errors
    /// The budget is below the floor, the selector does not suit the folder, or the activation is unknown.
    pub fn for_stock(folder: &FlashFolder, options: &SparseOptions) -> Result<Self> {
        let facts = StockFacts::of(folder, &read_config(folder)?)?;
        Self::for_struct(folder, facts, options)
    }

    /// Candle's own `VarBuilder` over the folder, from its root, for structs that nobody changed: on the CPU, in the dtype that was
    /// planned for, or F32. Loads the FFNs. Structs built from the same `FlashVarBuilder` share their weights.
    ///
    /// # Errors
    /// Candle's products do not come here, the budget was planned for another struct, or an FFN cannot be loaded.
    pub fn sparse(&self) -> Result<VarBuilder<'static>> {
        check_patch()?;
        let root = self.root();
        let folder = self.folder();
        let facts = || StockFacts::of(folder, &read_config(folder)?);
        let setup = self.setup_for(StructKind::Patched, facts)?;
        self.store().load(folder, || root.load_ffns(&setup))?;
        if let Some(plan) = self.stock_plan() {
            plan.prove_scratch();
        }
        let dtype = setup.dtype;
        let backend = Box::new(SparseBackend::new(root, setup));
        Ok(VarBuilder::from_backend(backend, dtype, Device::Cpu))
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
        setup: &StockSetup,
    ) -> Result<Tensor> {
        let (store, dtype) = (self.store(), setup.dtype);
        let uses = store.uses(Some(of_struct));
        let placeholder = if let Some((ffn, part)) = ffn_of(store.ffns(), name) {
            Placeholder::new(shape, dtype, uses, move |x, y| match part {
                FfnPart::Gate | FfnPart::Up => ffn.begin(part, x, y),
                FfnPart::Down => ffn.compute(&ffn.finish(x, dtype)?, y),
            })?
        } else {
            let matrix = self.shared_matrix(name, shape)?;
            let (name, tokens) = (name.to_owned(), setup.chunk_tokens);
            Placeholder::new(shape, dtype, uses, move |x, y| {
                linear_product((&name, &matrix), tokens, x, y)
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
