//! Between candle tensors and rows of f32 in CPU memory.

use candle::{DType, Device, Result, Storage, Tensor, D};

/// Calls `f(rows, values)` with `x` `(.., in_width)` as `rows` rows of f32 and gives its result, `(rows, out_width)`
/// values in row-major order, the leading dimensions, dtype and device of `x`.
pub(crate) fn map_rows(
    x: &Tensor,
    in_width: usize,
    out_width: usize,
    f: impl FnOnce(usize, &[f32]) -> Result<Vec<f32>>,
) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    check_width(x, in_width)?;
    let rows = x.elem_count().checked_div(in_width).unwrap_or(0);
    let values = with_f32(x, |values| f(rows, values))?;
    if let Some(last) = shape.last_mut() {
        *last = out_width;
    }
    Tensor::from_vec(values, shape, &Device::Cpu)?
        .to_dtype(x.dtype())?
        .to_device(x.device())
}

/// Refuses `x` `(.., width)` of another width.
pub(crate) fn check_width(x: &Tensor, width: usize) -> Result<()> {
    let got = x.dim(D::Minus1)?;
    if got != width {
        candle::bail!("the input has width {got}, the layer takes {width}");
    }
    Ok(())
}

/// Calls `f` with the values of `x` in row-major order; no copy when `x` already is contiguous f32 on the CPU.
pub(crate) fn with_f32<T>(x: &Tensor, f: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let x = x
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle::bail!("a tensor moved to the CPU is not there");
    };
    let values = storage.as_slice::<f32>()?;
    let start = layout.start_offset();
    f(&values[start..start + layout.shape().elem_count()])
}

/// Adds `bias`, where there is one, to each of the rows, which are as long.
pub(crate) fn add_bias(rows: &mut [f32], bias: Option<&[f32]>) {
    let Some(bias) = bias else {
        return;
    };
    for row in rows.chunks_mut(bias.len().max(1)) {
        row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
    }
}
