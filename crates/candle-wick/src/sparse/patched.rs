//! Stock structs through the place of gemm: placeholders in the `VarBuilder`, products in a forward.

use std::sync::Arc;

use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;

use super::backend::SparseBackend;
use super::facts::StockFacts;
use super::placeholder::{check_patch, Placeholder};
use super::planned::Planned;
use crate::error::Result;
use crate::linear::by_rows;
use crate::matrix::Matrix;
use crate::var_builder::{FfnPart, FlashVarBuilder};

impl FlashVarBuilder {
    /// Candle's own `VarBuilder` over the folder, from its root, for structs that nobody changed: on the CPU, in the dtype that was
    /// planned for, or F32. Loads the FFNs. Structs built from the same `FlashVarBuilder` share their weights.
    ///
    /// # Errors
    /// Candle's products do not come here, or an FFN cannot be loaded.
    pub fn sparse(&self) -> Result<VarBuilder<'static>> {
        check_patch()?;
        let root = self.root();
        let planned = match self.planned() {
            Some(planned) => planned.clone(),
            None => Planned::without_plan(StockFacts::of(self.folder())?).into(),
        };
        self.store().load(|| root.load_ffns(&planned))?;
        if let Some(plan) = self.stock_plan() {
            plan.prove_scratch();
        }
        let dtype = planned.dtype;
        let backend = Box::new(SparseBackend::new(root, planned));
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
    pub(super) fn stand_in(
        &self,
        of_struct: usize,
        name: &str,
        shape: [usize; 2],
        planned: &Planned,
    ) -> Result<Tensor> {
        let (store, dtype) = (self.store(), planned.dtype);
        let uses = store.uses(Some(of_struct));
        let mut ffns = store.ffns().iter();
        let of_ffn = ffns.find_map(|ffn| Some((ffn.clone(), ffn.part(name)?)));
        let placeholder = if let Some((ffn, part)) = of_ffn {
            Placeholder::new(shape, dtype, uses, move |x, y| match part {
                FfnPart::Gate | FfnPart::Up => ffn.begin(part, x, y),
                FfnPart::Down => ffn.compute(&ffn.finish(x, dtype)?, y),
            })?
        } else {
            let matrix = self.shared_matrix(name, shape)?;
            let (name, [rows, columns]) = (name.to_owned(), shape);
            let tokens = planned.chunk_tokens;
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
    pub(super) fn embedding(&self, name: &str, shape: [usize; 2], dtype: DType) -> Result<Tensor> {
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
