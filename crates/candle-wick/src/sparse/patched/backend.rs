//! The `VarBuilder` backend of stock models that run sparse: placeholders for linear layers, values for all else.
//!
//! What belongs to a linear layer is known by the initialisation that `candle_nn` asks for with it.

use std::sync::Arc;

use candle::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::Init;

use crate::error::{Error, Result};
use crate::sparse::facts::HEAD;
use crate::sparse::setup::StockSetup;
use crate::sparse::{is_bias, is_embedding};
use crate::var_builder::FlashVarBuilder;

pub(super) struct SparseBackend {
    vb: FlashVarBuilder,
    /// The number of the struct that is built.
    of_struct: usize,
    setup: Arc<StockSetup>,
}

impl SparseBackend {
    pub(super) fn new(vb: FlashVarBuilder, setup: Arc<StockSetup>) -> Self {
        Self {
            of_struct: vb.store().begin_struct(),
            vb,
            setup,
        }
    }

    /// The name of a tensor in the folder.
    fn stored<'a>(&'a self, name: &'a str) -> &'a str {
        let head = &self.setup.facts.head;
        match name == HEAD && !head.is_empty() {
            true => head,
            false => name,
        }
    }

    fn tensor(&self, shape: &Shape, name: &str, is_linear: bool, dtype: DType) -> Result<Tensor> {
        let name = self.stored(name);
        let got = self
            .vb
            .weight_shape(name)
            .ok_or_else(|| self.vb.folder().missing(name))?;
        if got != shape.dims() {
            let (name, expected) = (name.to_owned(), shape.dims().to_vec());
            return Err(Error::Shape {
                name,
                expected,
                got,
            });
        }
        let planned = self.setup.dtype;
        if dtype != planned {
            let reason = format!("{name} is asked for as {dtype:?}, planned was {planned:?}: SparseOptions::dtype says which");
            return Err(Error::Stock { reason });
        }
        match *shape.dims() {
            [rows, columns] if is_embedding(name) => {
                self.vb.embedding(name, [rows, columns], dtype)
            }
            [rows, columns] if is_linear => {
                let shape = [rows, columns];
                self.vb.stand_in(self.of_struct, name, shape, &self.setup)
            }
            [_, _] => {
                let reason = format!(
                    "{name} is asked for as neither the weight of a linear layer nor an embedding, which the budget does not \
                     count"
                );
                Err(Error::Stock { reason })
            }
            _ => {
                if is_bias(name) {
                    self.vb.store().note_bias(self.of_struct, name);
                }
                Ok(self.vb.dense().get_unchecked_dtype(name, dtype)?)
            }
        }
    }
}

impl SimpleBackend for SparseBackend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle::Result<Tensor> {
        if !device.is_cpu() {
            let reason = "weights are multiplied on the CPU only".to_owned();
            return Err(Error::Stock { reason }.into());
        }
        let is_linear = matches!(init, Init::Kaiming { .. });
        Ok(self.tensor(&shape, name, is_linear, dtype)?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle::Result<Tensor> {
        let shape = self.vb.weight_shape(self.stored(name));
        let shape = shape.ok_or_else(|| self.vb.folder().missing(name))?;
        self.get(shape.into(), name, Init::Const(0.0), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vb.weight_shape(self.stored(name)).is_some()
    }
}
