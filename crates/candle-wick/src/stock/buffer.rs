//! The values of one matrix on their way in and out of a candle tensor.
//!
//! A tensor owns its values as a `Vec`. [`exchange`] puts another `Vec` of the same length in its place and takes
//! out what was there, so values come and go without a copy while a model keeps its clone of the tensor. What a
//! tensor holds while its values are elsewhere is as long, and all zeros that no page of memory stands behind.

use std::cell::RefCell;

use candle::{CpuStorage, DType, InplaceOp1, Layout, Shape, Tensor};
use half::{bf16, f16};
use wick_kernels::{widen, WeightDtype};

use crate::error::{Error, Result};

/// Values in a dtype that a model can ask for.
pub(super) enum Buffer {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Buffer {
    /// `len` zeros, fresh from the system where the allocator can.
    pub(super) fn zeroed(dtype: DType, len: usize) -> Result<Self> {
        fn zeros<T: bytemuck::Zeroable>(len: usize) -> Result<Vec<T>> {
            bytemuck::allocation::try_zeroed_vec(len).map_err(|()| Error::Stock {
                reason: format!("no memory for {len} values"),
            })
        }
        match dtype {
            DType::F32 => Ok(Self::F32(zeros(len)?)),
            DType::F16 => Ok(Self::F16(zeros(len)?)),
            DType::BF16 => Ok(Self::Bf16(zeros(len)?)),
            other => Err(Error::Stock {
                reason: format!("weights as {other:?} are not supported, F32, F16 and BF16 are"),
            }),
        }
    }

    /// Zeros without memory behind them: a tensor's values while they are on flash.
    pub(super) fn placeholder(dtype: DType, len: usize) -> Result<Self> {
        let mut buffer = Self::zeroed(dtype, len)?;
        // An allocator that reuses memory has just written the zeros.
        wick_io::release_to_zeros(buffer.bytes_mut());
        Ok(buffer)
    }

    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::BF16,
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice_mut(values),
            Self::F16(values) => bytemuck::cast_slice_mut(values),
            Self::Bf16(values) => bytemuck::cast_slice_mut(values),
        }
    }

    /// Makes every use of these values visible.
    pub(super) fn fill_nan(&mut self) {
        match self {
            Self::F32(values) => values.fill(f32::NAN),
            Self::F16(values) => values.fill(f16::NAN),
            Self::Bf16(values) => values.fill(bf16::NAN),
        }
    }

    /// Stored weights `bytes` become the values from `start` on, every `step`-th one: rounded to nearest even, as
    /// candle's `to_dtype`.
    pub(super) fn set(&mut self, from: WeightDtype, bytes: &[u8], start: usize, step: usize) {
        match self {
            Self::F32(values) if step == 1 => {
                let count = bytes.len() / from.size_bytes();
                widen(from, bytes, &mut values[start..start + count]);
            }
            Self::F16(values) if step == 1 && from == WeightDtype::F16 => {
                let target = bytemuck::cast_slice_mut::<f16, u8>(&mut values[start..]);
                target[..bytes.len()].copy_from_slice(bytes);
            }
            Self::Bf16(values) if step == 1 && from == WeightDtype::Bf16 => {
                let target = bytemuck::cast_slice_mut::<bf16, u8>(&mut values[start..]);
                target[..bytes.len()].copy_from_slice(bytes);
            }
            Self::F32(values) => scatter(from, bytes, &mut values[start..], step, |value| value),
            Self::F16(values) => scatter(from, bytes, &mut values[start..], step, f16::from_f32),
            Self::Bf16(values) => scatter(from, bytes, &mut values[start..], step, bf16::from_f32),
        }
    }

    /// A tensor with these values.
    pub(super) fn into_tensor(self, shape: Shape) -> Result<Tensor> {
        let device = &candle::Device::Cpu;
        Ok(match self {
            Self::F32(values) => Tensor::from_vec(values, shape, device)?,
            Self::F16(values) => Tensor::from_vec(values, shape, device)?,
            Self::Bf16(values) => Tensor::from_vec(values, shape, device)?,
        })
    }
}

/// Values widened and written to every `step`-th place.
fn scatter<T>(
    from: WeightDtype,
    bytes: &[u8],
    target: &mut [T],
    step: usize,
    narrow: impl Fn(f32) -> T,
) {
    const LANES: usize = 256;
    let mut lanes = [0f32; LANES];
    let mut places = target.iter_mut().step_by(step);
    for bytes in bytes.chunks(LANES * from.size_bytes()) {
        let lanes = &mut lanes[..bytes.len() / from.size_bytes()];
        widen(from, bytes, lanes);
        for (value, place) in lanes.iter().zip(places.by_ref()) {
            *place = narrow(*value);
        }
    }
}

/// Puts the values of `buffer` into `tensor` and takes out what was there.
///
/// # Errors
/// The tensor has another dtype, number of values or device.
pub(super) fn exchange(tensor: &Tensor, buffer: &mut Buffer) -> candle::Result<()> {
    tensor.inplace_op1(&Exchange(RefCell::new(buffer)))
}

struct Exchange<'a>(RefCell<&'a mut Buffer>);

impl InplaceOp1 for Exchange<'_> {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle::Result<()> {
        let mut buffer = self.0.borrow_mut();
        match (&mut **buffer, storage) {
            (Buffer::F32(new), CpuStorage::F32(old)) if new.len() == old.len() => {
                std::mem::swap(new, old)
            }
            (Buffer::F16(new), CpuStorage::F16(old)) if new.len() == old.len() => {
                std::mem::swap(new, old)
            }
            (Buffer::Bf16(new), CpuStorage::BF16(old)) if new.len() == old.len() => {
                std::mem::swap(new, old)
            }
            _ => candle::bail!("a tensor's values can only be exchanged for as many of its dtype"),
        }
        Ok(())
    }
}
