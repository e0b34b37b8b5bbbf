//! Weight files of other programs: what their bytes mean.
//!
//! | function | file |
//! |---|---|
//! | [`read_torch`] | PyTorch `.bin`, `.pt` and `.pth`: zip archives and the format before them |
//! | [`read_gguf`] | GGUF, versions 2 and 3 |
//!
//! Both take the whole file as one slice, which may be a map of 100 GB: the headers are read, the
//! data never is. They return [`StoredTensor`]s, whose extents are proved to lie in the slice.
//! Nothing in a file is ever executed.
//!
//! Not here: paths and mapping, index files of sharded checkpoints, what a tensor's name means for
//! a model, and turning bytes into numbers. Safetensors files are read by `wick-format`.
#![forbid(unsafe_code)]

mod bytes;
mod error;
mod gguf;
mod tensor;
mod torch;

pub use error::CheckpointError;
pub use gguf::{read_gguf, FromMetadata, GgufFile, Metadata, MetadataValue};
pub use tensor::StoredTensor;
pub use torch::read_torch;
