//! An embedding whose rows come from DRAM, or from flash as they are asked for.

use std::sync::Arc;

use candle::{Device, Tensor};

use crate::error::Result;
use crate::linear::FlashLinear;
use crate::matrix::Matrix;
use crate::var_builder::FlashVarBuilder;

/// `weight` `(vocab_size, hidden_size)`; rows leave as f32.
#[derive(Clone)]
pub struct FlashEmbedding {
    weight: Arc<Matrix>,
    hidden_size: usize,
}

impl FlashEmbedding {
    /// Loads `weight`, or leaves it on flash where the budget says so or when it is to be read `by_rows`: a
    /// token needs one row of a table that may be the largest tensor of the model.
    pub fn load(
        vocab_size: usize,
        hidden_size: usize,
        by_rows: bool,
        vb: FlashVarBuilder,
    ) -> Result<Self> {
        let shape = [vocab_size, hidden_size];
        let weight = if by_rows {
            vb.matrix_on_flash(&shape, "weight")
        } else {
            vb.matrix(&shape, "weight")
        };
        let weight = Arc::new(weight?);
        Ok(Self {
            weight,
            hidden_size,
        })
    }

    /// The rows of `ids` `(.., )` as `(.., hidden_size)`, f32 on the CPU; an id out of range is an error.
    pub fn forward(&self, ids: &Tensor) -> candle::Result<Tensor> {
        let mut shape = ids.dims().to_vec();
        shape.push(self.hidden_size);
        let ids = ids
            .flatten_all()?
            .to_dtype(candle::DType::U32)?
            .to_vec1::<u32>()?;
        let mut values = vec![0.0; ids.len() * self.hidden_size];
        for (id, row) in ids.iter().zip(values.chunks_mut(self.hidden_size.max(1))) {
            if *id as usize >= self.weight.rows() {
                candle::bail!(
                    "id {id} is outside the embedding's {} rows",
                    self.weight.rows()
                );
            }
            self.weight.read_row(*id as usize, row)?;
        }
        Tensor::from_vec(values, shape, &Device::Cpu)
    }

    /// The head of a tied model: the same matrix, one copy, and the `bias` at `head` when the model has one.
    pub fn tied_head(&self, head: &FlashVarBuilder) -> Result<FlashLinear> {
        FlashLinear::with_weight(self.weight.clone(), head)
    }
}
