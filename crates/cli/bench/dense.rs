//! The row that everybody has without this program: all weights in DRAM, products by candle's own matmul.
//!
//! Only the products with weights are computed: attention itself, norms and the like would come on top, so the row
//! is a lower bound of what candle takes. The values are arbitrary, their time does not depend on them; every matrix
//! has memory of its own.

use std::time::Instant;

use anyhow::{Context, Result};
use candle::{DType, Device, Module, Tensor};
use candle_nn::Linear;
use candle_wick::FlashFolder;

/// The matrices that a token is multiplied with, in the order of the names.
pub(crate) struct DenseModel {
    linears: Vec<Linear>,
    dtype: DType,
    pub(crate) bytes: u64,
}

/// Shapes `(out, in)` of the matrices that a token is multiplied with.
fn shapes(folder: &FlashFolder) -> Vec<(usize, usize)> {
    let tensors: Vec<(&str, &[usize])> = folder
        .resident_tensors()
        .filter(|(_, extent)| extent.shape.len() == 2)
        .map(|(name, extent)| (name.as_str(), extent.shape.as_slice()))
        .collect();
    let has_head = tensors.iter().any(|(name, _)| name.starts_with("lm_head."));
    // Embeddings are looked up, but for a tied one, which is the head too.
    let is_multiplied = |name: &str| match name.contains("embed") {
        true => !has_head && !name.contains("position"),
        false => true,
    };
    let resident = tensors.into_iter().filter(|(name, _)| is_multiplied(name));
    let mut shapes: Vec<_> = resident.map(|(_, shape)| (shape[0], shape[1])).collect();
    for layer in &folder.manifest().layers {
        let (ffn, hidden) = (layer.intermediate_size, layer.hidden_size);
        let inner = if layer.gate.is_some() { 2 } else { 1 };
        shapes.extend(std::iter::repeat_n((ffn, hidden), inner));
        shapes.push((hidden, ffn));
    }
    shapes
}

/// Bytes that [`DenseModel::new`] takes.
pub(crate) fn dense_bytes(folder: &FlashFolder) -> u64 {
    let size = folder.manifest().dtype.size_bytes();
    let elements = shapes(folder).into_iter().map(|(out, width)| out * width);
    (elements.sum::<usize>() * size) as u64
}

impl DenseModel {
    pub(crate) fn new(folder: &FlashFolder) -> Result<Self> {
        let name = folder.manifest().dtype.name();
        let dtype: DType = name.parse().ok().context("a dtype that candle has")?;
        let linear = |(out, width): (usize, usize)| -> Result<Linear> {
            // Touched, and not all the same page.
            let row = Tensor::arange(0f32, width as f32, &Device::Cpu)?.affine(1e-4, 0.01)?;
            let weight = row
                .to_dtype(dtype)?
                .broadcast_as((out, width))?
                .contiguous()?;
            Ok(Linear::new(weight, None))
        };
        Ok(Self {
            linears: shapes(folder)
                .into_iter()
                .map(linear)
                .collect::<Result<_>>()?,
            dtype,
            bytes: dense_bytes(folder),
        })
    }

    /// Milliseconds of one token.
    pub(crate) fn token_ms(&self) -> Result<f64> {
        let widths = self.linears.iter().map(|linear| linear.weight().dims()[1]);
        let widest = widths.max().unwrap_or(0);
        let input = Tensor::ones((1, widest), self.dtype, &Device::Cpu)?;
        let started = Instant::now();
        for linear in &self.linears {
            let x = input
                .narrow(1, 0, linear.weight().dims()[1])?
                .contiguous()?;
            std::hint::black_box(linear.forward(&x)?);
        }
        Ok(1000.0 * started.elapsed().as_secs_f64())
    }
}
