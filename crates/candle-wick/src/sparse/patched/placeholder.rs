//! A tensor that stands for a weight in a stock struct: an address that `gemm::wick` knows.
//!
//! Its values are zeros that nobody reads, so that they take no memory; those of an embedding, which candle looks up, are there.
//!
//! Invariant: while the placeholder lives its values stay where they are. When it goes zeros are taken out of the tensor
//! first: a model that still holds it gets an error from candle then, and no other tensor ever lay at an address that is
//! registered. (Who replaces the values of a model's weight by an in-place operation of candle's breaks that.)

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use candle::{CpuStorage, DType, Device, Shape, Storage, Tensor};
use gemm::wick::{catching, register, Registration};
use wick_kernels::{dot_rows, WeightDtype};

use super::running::{is_running, outer, Running};
use crate::error::{Error, Result};
use crate::linear::transposed;
use crate::matrix::Matrix;
use crate::stock::buffer::{take, Buffer};

/// Whose forwards the products of a placeholder belong to, and how many there were.
#[derive(Clone)]
pub(super) struct Uses {
    pub(super) store: u64,
    pub(super) products: Arc<AtomicU64>,
}

/// A weight of a stock struct whose products come here.
pub(super) struct Placeholder {
    tensor: Tensor,
    has_values: bool,
    was_used: Arc<AtomicBool>,
    registration: Option<Registration>,
}

impl Placeholder {
    /// A tensor `(rows, columns)` without values; `product` computes `y` `(tokens, rows)` of `x` `(tokens, columns)`, or says why
    /// not.
    pub(super) fn new(
        shape: [usize; 2],
        dtype: DType,
        uses: Uses,
        product: impl Fn(&[f32], &mut [f32]) -> std::result::Result<(), String> + Send + Sync + 'static,
    ) -> Result<Self> {
        let values = Buffer::zeroed(dtype, shape[0] * shape[1])?.untouched();
        let tensor = values.into_tensor(Shape::from(&shape))?;
        Self::over(tensor, shape, false, uses, product)
    }

    /// The rows of `matrix` as a tensor that is looked up by rows, and may be a head, too: its products go through our kernels, which
    /// have all threads for a single token.
    pub(super) fn embedding(
        matrix: &Matrix,
        shape: [usize; 2],
        dtype: DType,
        uses: Uses,
    ) -> Result<Self> {
        let [rows, columns] = shape;
        let mut values = Buffer::zeroed(dtype, rows * columns)?;
        matrix.for_each_rows(0..rows, |rows, bytes| {
            values.set(matrix.dtype(), bytes, rows.start * columns, 1);
            Ok(())
        })?;
        let tensor = values.into_tensor(Shape::from(&shape))?;
        let values = tensor.clone();
        Self::over(tensor, shape, true, uses, move |x, y| {
            let (storage, _) = values.storage_and_layout();
            let Storage::Cpu(storage) = &*storage else {
                return Err("an embedding left the CPU".to_owned());
            };
            let of_dtype = match storage {
                CpuStorage::F16(values) => (WeightDtype::F16, bytemuck::cast_slice(values)),
                CpuStorage::F32(values) => (WeightDtype::F32, bytemuck::cast_slice(values)),
                _ => return Err("an embedding changed its dtype".to_owned()),
            };
            let (dtype, bytes): (_, &[u8]) = of_dtype;
            let row = |row: usize| &bytes[row * columns * dtype.size_bytes()..];
            let mut by_row = vec![0.0; y.len()];
            let tokens = x.len() / columns;
            dot_rows(dtype, rows, row, x, tokens, &mut by_row);
            y.copy_from_slice(&transposed(by_row, rows, tokens));
            Ok(())
        })
    }

    fn over(
        tensor: Tensor,
        shape: [usize; 2],
        has_values: bool,
        uses: Uses,
        product: impl Fn(&[f32], &mut [f32]) -> std::result::Result<(), String> + Send + Sync + 'static,
    ) -> Result<Self> {
        if shape.contains(&0) {
            let reason = format!("a weight of shape {shape:?} has no elements");
            return Err(Error::Stock { reason });
        }
        let was_used = Arc::new(AtomicBool::new(has_values));
        let use_it = was_used.clone();
        let product = move |x: &[f32], y: &mut [f32]| {
            if !is_running(uses.store) {
                return Err(
                    "a product with a weight on flash outside of FlashVarBuilder::forward"
                        .to_owned(),
                );
            }
            use_it.store(true, Ordering::Relaxed);
            uses.products.fetch_add(1, Ordering::Relaxed);
            product(x, y)
        };
        let registration = register(addresses(&tensor)?, shape, Box::new(product));
        Ok(Self {
            tensor,
            has_values,
            was_used,
            registration: Some(registration),
        })
    }

    /// What a model holds.
    pub(super) fn tensor(&self) -> Tensor {
        self.tensor.clone()
    }

    /// Whether it was multiplied, ever, or may be used otherwise.
    pub(super) fn was_used(&self) -> bool {
        self.was_used.load(Ordering::Relaxed)
    }
}

impl Drop for Placeholder {
    fn drop(&mut self) {
        if self.has_values {
            drop(self.registration.take());
            return;
        }
        match take(&self.tensor) {
            Ok(values) => {
                drop(self.registration.take());
                drop(values);
            }
            // Nothing in candle makes it so; but addresses that are registered must not be free for others.
            Err(_) => std::mem::forget((self.registration.take(), self.tensor.clone())),
        }
    }
}

/// Where the values of a tensor lie.
fn addresses(tensor: &Tensor) -> Result<std::ops::Range<usize>> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        let reason = "weights are multiplied on the CPU only".to_owned();
        return Err(Error::Stock { reason });
    };
    Ok(match tensor.dtype() {
        DType::F16 => {
            let values = storage.as_slice::<half::f16>()?.as_ptr_range();
            values.start as usize..values.end as usize
        }
        _ => {
            let values = storage.as_slice::<f32>()?.as_ptr_range();
            values.start as usize..values.end as usize
        }
    })
}

/// Sees whether candle's products come here at all: not if it multiplies with MKL or Accelerate, or by another gemm.
pub(super) fn check_patch() -> Result<()> {
    let uses = Uses {
        store: u64::MAX,
        products: Arc::default(),
    };
    let probe = Placeholder::new([1, 1], DType::F32, uses, |_, y| {
        y[0] = 7.0;
        Ok(())
    })?;
    let one = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
    let product = || {
        one.matmul(&probe.tensor.t()?)?
            .flatten_all()?
            .to_vec1::<f32>()
    };
    let _running = Running::begin(outer(), u64::MAX);
    let (product, _) = catching(product);
    if product? == [7.0] {
        return Ok(());
    }
    let reason = "candle's products do not come to wick-gemm: it was built with mkl or accelerate, or with another gemm than \
        the one that [patch.crates-io] replaces"
        .to_owned();
    Err(Error::Stock { reason })
}
