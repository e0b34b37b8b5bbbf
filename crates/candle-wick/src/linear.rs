//! A linear layer over a [`Matrix`]: `y = x wᵀ + b`, its weight in DRAM or streamed from flash.
//!
//! Weights stay in the stored dtype, sums are f32. A streamed product equals a resident one bit for bit.

use std::sync::Arc;

use candle::{Module, Tensor};

use crate::error::Result;
use crate::matrix::Matrix;
use crate::rows::map_rows;
use crate::var_builder::FlashVarBuilder;

/// `x (.., in_dim) -> (.., out_dim)`, as `candle_nn::Linear`.
#[derive(Clone)]
pub struct FlashLinear {
    weight: Arc<Matrix>,
    bias: Option<Arc<[f32]>>,
}

impl FlashLinear {
    /// `weight` `(out_dim, in_dim)`, and `bias` `(out_dim)` when the model has one.
    pub fn load(in_dim: usize, out_dim: usize, vb: FlashVarBuilder) -> Result<Self> {
        let weight = Arc::new(vb.matrix(&[out_dim, in_dim], "weight")?);
        Self::with_weight(weight, &vb)
    }

    /// A matrix that is loaded already, and the `bias` at `vb` when the model has one.
    pub(crate) fn with_weight(weight: Arc<Matrix>, vb: &FlashVarBuilder) -> Result<Self> {
        let bias = if vb.contains_tensor("bias") {
            Some(vb.values(weight.rows(), "bias")?.into())
        } else {
            None
        };
        Ok(Self { weight, bias })
    }

    /// Whether the weight is in DRAM.
    pub fn is_resident(&self) -> bool {
        self.weight.is_resident()
    }
}

impl Module for FlashLinear {
    fn forward(&self, x: &Tensor) -> candle::Result<Tensor> {
        let out_dim = self.weight.rows();
        map_rows(x, self.weight.columns(), out_dim, |tokens, x| {
            let mut by_row = vec![0.0; out_dim * tokens];
            self.weight.product(x, tokens, &mut by_row)?;
            if let Some(bias) = &self.bias {
                for (row, bias) in by_row.chunks_mut(tokens.max(1)).zip(bias.iter()) {
                    row.iter_mut().for_each(|y| *y += bias);
                }
            }
            Ok(transposed(by_row, out_dim, tokens))
        })
    }
}

/// `(rows, tokens)` values as `(tokens, rows)`.
fn transposed(by_row: Vec<f32>, rows: usize, tokens: usize) -> Vec<f32> {
    if tokens == 1 {
        return by_row;
    }
    let mut by_token = vec![0.0; by_row.len()];
    for (row, values) in by_row.chunks(tokens.max(1)).enumerate() {
        for (token, value) in values.iter().enumerate() {
            by_token[token * rows + row] = *value;
        }
    }
    by_token
}
