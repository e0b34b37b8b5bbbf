//! What a caller of [`convert`](crate::convert) gives and gets.

use wick_format::{Dtype, FileEntry, Layout};

/// How to convert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Element type for all weights; `None` keeps the stored ones.
    pub dtype: Option<Dtype>,
    /// Activation to write into the converted `config.json`, for checkpoints whose own is wrong.
    pub activation: Option<String>,
    /// Which records a layer has. Another order of neurons is made by [`reorder`](crate::reorder::reorder), not here.
    pub layout: Layout,
    /// Layers are put together in one file up to this size; a larger layer has a file of its own.
    pub max_file_bytes: u64,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            activation: None,
            layout: Layout::Neuron,
            max_file_bytes: 1 << 30,
        }
    }
}

/// How far a conversion is. `done_bytes` never shrinks and ends at `total_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertProgress<'a> {
    /// Bytes hashed and written.
    pub done_bytes: u64,
    /// Bytes to be hashed and written in all.
    pub total_bytes: u64,
    /// The file at work.
    pub step: &'a str,
}

/// What a conversion did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertReport {
    /// The files of the folder, without the manifest.
    pub files: Vec<FileEntry>,
    /// FFN layers.
    pub layers: usize,
    /// Bytes of `resident.safetensors`.
    pub resident_bytes: u64,
    /// Bytes of the record files.
    pub ffn_bytes: u64,
    /// Tensors of the source that a model of this type does not have.
    pub ignored_tensors: Vec<String>,
    /// What the user should know, a sentence each.
    pub notes: Vec<String>,
}
