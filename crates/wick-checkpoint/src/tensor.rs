//! A tensor in a file: what it is called, how it is laid out, where its bytes are.
//!
//! Invariants of a tensor that a reader of this crate returns:
//! - every element that `shape` and `strides` can address lies in its extent, and the extent lies
//!   in the file;
//! - the product of `shape` is at most eight times the length of the file in bytes, however small
//!   the strides or the blocks are: memory for the elements is backed by the file.
//!
//! Not here: whether two tensors share bytes. Tied weights do.

use crate::CheckpointError;

/// One tensor of a weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name, unique in the file.
    pub name: String,
    /// Element type: as safetensors spells it (`F16`, `I64`), or in GGUF files as ggml does
    /// (`Q4_K`).
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Distance between neighbours in each dimension, in elements.
    pub strides: Vec<usize>,
    /// First byte, absolute in the file.
    pub offset_bytes: u64,
    /// Length from the first byte to the end of the last element.
    pub len_bytes: u64,
}

/// The strides of a tensor without gaps whose last dimension is innermost; saturating.
pub(crate) fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for inner in (1..shape.len()).rev() {
        strides[inner - 1] = shape[inner].max(1).saturating_mul(strides[inner]);
    }
    strides
}

/// The product of `shape`; `None` when it does not fit 64 bits.
pub(crate) fn element_count(shape: &[usize]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape
        .iter()
        .try_fold(1u64, |count, &dim| count.checked_mul(dim as u64))
}

impl StoredTensor {
    /// Whether the elements lie side by side in row-major order, so that the extent is the tensor.
    pub fn is_contiguous(&self) -> bool {
        let dims = self.shape.iter().zip(&self.strides);
        self.shape.contains(&0)
            || dims
                .zip(row_major(&self.shape))
                .all(|((&dim, &stride), packed)| dim == 1 || stride == packed)
    }

    /// The error of this tensor.
    pub(crate) fn error(name: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::Tensor {
            tensor: name.into(),
            problem: problem.into(),
        }
    }
}
