//! From views of storages to tensors in the file: the proof that nothing lies outside.

use super::heap::{Storage, View};
use crate::tensor::element_count;
use crate::{CheckpointError, StoredTensor};

/// Where the elements under a storage's key lie in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// First byte, absolute in the file.
    pub(super) offset_bytes: u64,
    /// Length; the end lies in the file.
    pub(super) len_bytes: u64,
}

/// The tensor `name`, a view of a storage whose key's elements lie at `root`.
///
/// # Errors
/// The storage is larger than its data, or an element lies outside of it.
pub(super) fn place(
    name: &str,
    view: &View<'_>,
    root: Extent,
    file_len: u64,
) -> Result<StoredTensor, CheckpointError> {
    let storage = &view.storage;
    let fail = |problem: String| StoredTensor::error(name, problem);
    let within = within_root(storage, root)
        .ok_or_else(|| fail(format!("{} does not fit its data", describe(storage, root))))?;
    let size_bytes = view.dtype.size_bytes;
    let span = span_bytes(view).filter(|&(start, len)| {
        start
            .checked_add(len)
            .is_some_and(|end| end <= within.len_bytes)
    });
    let (start, len_bytes) = span.ok_or_else(|| {
        fail(format!(
            "shape {:?}, strides {:?} and offset {} reach beyond its storage of {} elements",
            view.shape,
            view.strides,
            view.offset,
            within.len_bytes / size_bytes,
        ))
    })?;
    if element_count(&view.shape).is_none_or(|count| count > file_len) {
        let shape = &view.shape;
        return Err(fail(format!(
            "shape {shape:?} has more elements than the file has bytes"
        )));
    }
    Ok(StoredTensor {
        name: name.into(),
        dtype: view.dtype.name.into(),
        shape: view.shape.clone(),
        strides: view.strides.clone(),
        offset_bytes: within.offset_bytes + start, // both in the file
        len_bytes,
    })
}

/// The bytes of a storage, which may be only a part of what lies under its key.
fn within_root(storage: &Storage<'_>, root: Extent) -> Option<Extent> {
    let size_bytes = storage.dtype.size_bytes;
    let root_bytes = storage.root_count.checked_mul(size_bytes)?;
    let (first, count) = storage.part.unwrap_or((0, storage.root_count));
    let start = first.checked_mul(size_bytes)?;
    let len_bytes = count.checked_mul(size_bytes)?;
    let fits = root_bytes <= root.len_bytes && start.checked_add(len_bytes)? <= root_bytes;
    fits.then_some(Extent {
        offset_bytes: root.offset_bytes + start, // in the file
        len_bytes,
    })
}

fn describe(storage: &Storage<'_>, root: Extent) -> String {
    let (count, bytes) = (storage.root_count, root.len_bytes);
    let dtype = storage.dtype.name;
    format!(
        "its storage `{}` of {count} {dtype} ({bytes} bytes in the file)",
        storage.key
    )
}

/// First byte and length of what a view addresses, relative to its storage.
fn span_bytes(view: &View<'_>) -> Option<(u64, u64)> {
    let size_bytes = view.dtype.size_bytes;
    let start = view.offset.checked_mul(size_bytes)?;
    if view.shape.contains(&0) {
        return Some((start, 0));
    }
    let dims = view.shape.iter().zip(&view.strides);
    let last = dims.into_iter().try_fold(0u64, |last, (&dim, &stride)| {
        last.checked_add((dim as u64 - 1).checked_mul(stride as u64)?)
    })?;
    Some((start, last.checked_add(1)?.checked_mul(size_bytes)?))
}
