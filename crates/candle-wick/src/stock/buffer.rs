//! The values of one matrix on their way in and out of a candle tensor.
//!
//! A tensor owns its values as a `Vec`. [`put`] moves a `Vec` into it and [`take`] moves it out again, so values come
//! and go without a copy while a model keeps its clone of the tensor.
//!
//! Invariant: a tensor whose values are elsewhere has none, and its storage says so: it is of a dtype ([`AWAY`]) that
//! candle has no kernels for. Candle matches the storages of all operands before it computes, so who uses such a tensor,
//! at whatever time and by whatever operation, gets an error, never numbers. (An empty `Vec` of the right dtype would
//! be read beyond its end.)

use std::cell::RefCell;

use candle::op::BackpropOp;
use candle::{CpuStorage, DType, InplaceOp1, Layout, Shape, Storage, Tensor};
use half::{bf16, f16};
use wick_kernels::{widen, WeightDtype};

use crate::error::{Error, Result};

/// What the storage of a tensor without values says it holds.
const AWAY: DType = DType::F4;

/// Values in a dtype that a model can ask for.
pub(crate) enum Buffer {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Buffer {
    /// `len` zeros, fresh from the system where the allocator can.
    pub(crate) fn zeroed(dtype: DType, len: usize) -> Result<Self> {
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

    /// Zeros that take no memory until somebody writes, where the system can.
    #[cfg(feature = "wick-gemm")]
    pub(crate) fn untouched(mut self) -> Self {
        wick_io::release_zeros(self.bytes_mut());
        self
    }

    /// Frees the values, with the memory behind them: an allocator may keep the place, not its pages.
    pub(super) fn free(mut self) {
        wick_io::release_to_zeros(self.bytes_mut());
    }

    /// Stored weights `bytes` become the values from `start` on, every `step`-th one: rounded to nearest even, as
    /// candle's `to_dtype`.
    pub(crate) fn set(&mut self, from: WeightDtype, bytes: &[u8], start: usize, step: usize) {
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

    fn into_storage(self) -> CpuStorage {
        match self {
            Self::F32(values) => CpuStorage::F32(values),
            Self::F16(values) => CpuStorage::F16(values),
            Self::Bf16(values) => CpuStorage::BF16(values),
        }
    }

    fn from_storage(storage: CpuStorage) -> Option<Self> {
        match storage {
            CpuStorage::F32(values) => Some(Self::F32(values)),
            CpuStorage::F16(values) => Some(Self::F16(values)),
            CpuStorage::BF16(values) => Some(Self::Bf16(values)),
            _ => None,
        }
    }

    /// A tensor with these values.
    pub(crate) fn into_tensor(self, shape: Shape) -> Result<Tensor> {
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

/// A tensor of `dtype` and `shape` that has no values yet.
pub(super) fn without_values(dtype: DType, shape: Shape) -> Result<Tensor> {
    let empty = Storage::Cpu(Buffer::zeroed(dtype, 0)?.into_storage());
    let tensor = Tensor::from_storage(empty, shape, BackpropOp::none(), false);
    exchange(&tensor, CpuStorage::F4(Vec::new()))?; // before anybody else has it
    Ok(tensor)
}

/// Gives `tensor` its values.
///
/// # Errors
/// They are of another dtype or number.
pub(super) fn put(tensor: &Tensor, buffer: Buffer) -> candle::Result<()> {
    if (buffer.dtype(), buffer.len()) != (tensor.dtype(), tensor.elem_count()) {
        candle::bail!(
            "{} values of {:?} for a tensor of {} of {:?}",
            buffer.len(),
            buffer.dtype(),
            tensor.elem_count(),
            tensor.dtype()
        )
    }
    exchange(tensor, buffer.into_storage()).map(drop)
}

/// Takes the values out of `tensor`; `None` if it has none.
pub(crate) fn take(tensor: &Tensor) -> candle::Result<Option<Buffer>> {
    let storage = exchange(tensor, CpuStorage::F4(Vec::new()))?;
    Ok(Buffer::from_storage(storage))
}

/// Whether an error of candle's says that a tensor was used while its values were elsewhere.
pub(super) fn is_away(error: &candle::Error) -> bool {
    use candle::Error as E;
    match error {
        E::DTypeMismatchBinaryOp { lhs, rhs, .. } => *lhs == AWAY || *rhs == AWAY,
        E::UnsupportedDTypeForOp(dtype, _) | E::UnexpectedDType { got: dtype, .. } => {
            *dtype == AWAY
        }
        E::Context { inner, .. } | E::WithBacktrace { inner, .. } | E::WithPath { inner, .. } => {
            is_away(inner)
        }
        _ => false,
    }
}

fn exchange(tensor: &Tensor, storage: CpuStorage) -> candle::Result<CpuStorage> {
    let exchange = Exchange(RefCell::new(storage));
    tensor.inplace_op1(&exchange)?;
    Ok(exchange.0.into_inner())
}

/// Candle holds the storage's lock for writing meanwhile, and for reading while a kernel reads.
struct Exchange(RefCell<CpuStorage>);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle::Result<()> {
        std::mem::swap(&mut *self.0.borrow_mut(), storage);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle::Device;

    /// Everything that a model could do with a weight, at the wrong time.
    #[test]
    fn a_tensor_without_values_is_an_error_in_every_operation_and_whole_again_after() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let away = without_values(dtype, (4, 6).into()).unwrap();
            assert_eq!((away.dtype(), away.dims()), (dtype, &[4, 6][..]));
            let x = Tensor::ones((3, 6), dtype, &Device::Cpu).unwrap();
            let row = Tensor::ones((4, 6), dtype, &Device::Cpu).unwrap();
            let index = Tensor::new(&[0u32, 1], &Device::Cpu).unwrap();
            let (other_dtype, transposed) = (DType::F64, away.t().unwrap());
            let outcomes = [
                x.matmul(&transposed),
                x.unsqueeze(0).unwrap().broadcast_matmul(&transposed),
                transposed.contiguous(),
                away.force_contiguous(),
                away.to_dtype(other_dtype),
                away.index_select(&index, 0),
                away.narrow(1, 1, 2).unwrap().contiguous(),
                Tensor::cat(&[&row, &away], 0),
                Tensor::cat(&[&away, &away], 0),
                Tensor::stack(&[&away, &away], 0),
                &away + &row,
                &row * &away,
                &away * 2.0,
                away.sqr(),
                away.sum_all(),
                away.flatten_all().unwrap().reshape((6, 4)).unwrap() + 1.0,
                away.copy().unwrap() + 1.0,
                away.broadcast_as((2, 4, 6)).unwrap().contiguous(),
                away.repeat((2, 1)),
            ];
            for (number, outcome) in outcomes.into_iter().enumerate() {
                let error = outcome.err().unwrap_or_else(|| panic!("{number}"));
                assert!(is_away(&error), "{number}: {error}");
            }
            assert!(away.flatten_all().unwrap().to_vec1::<f32>().is_err());

            let mut ones = Buffer::zeroed(dtype, 24).unwrap();
            ones.set(WeightDtype::F32, &1f32.to_le_bytes().repeat(24), 0, 1);
            put(&away, ones).unwrap();
            let sums = x.matmul(&transposed).unwrap();
            let sums = sums.to_dtype(DType::F32).unwrap();
            assert_eq!(sums.to_vec2::<f32>().unwrap(), [[6.0; 4]; 3]);
            assert_eq!(take(&away).unwrap().map(|values| values.len()), Some(24));
            assert!(take(&away).unwrap().is_none());
            assert!(x.matmul(&transposed).is_err());
        }
        let away = without_values(DType::F32, (4, 6).into()).unwrap();
        assert!(put(&away, Buffer::zeroed(DType::F32, 23).unwrap()).is_err());
        assert!(put(&away, Buffer::zeroed(DType::F16, 24).unwrap()).is_err());
        assert!(without_values(DType::U32, (4, 6).into()).is_err());
    }
}
