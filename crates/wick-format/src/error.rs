//! Everything that can be wrong with a converted folder's bytes, with the name and the numbers.
//!
//! The path of the file is not known here: whoever read the bytes adds it.

use thiserror::Error;

/// A manifest, a header or a request for a layout that breaks the format.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The length field in the first eight bytes cannot be true.
    #[error(
        "header length {got} is out of bounds: at most {limit} bytes fit a file of {file_len_bytes} bytes"
    )]
    HeaderLength {
        /// Length that the file claims.
        got: u64,
        /// Largest length that would be accepted.
        limit: u64,
        /// Size of the file.
        file_len_bytes: u64,
    },
    /// The header is not a JSON object from its first byte on.
    #[error("header does not start with `{{`")]
    HeaderStart,
    /// JSON that does not parse, or has a key twice, or lacks a key.
    #[error("{what}: {source}")]
    Json {
        /// Which text it was.
        what: &'static str,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A dtype that this version does not know.
    #[error("tensor `{tensor}`: unknown dtype `{got}`, expected one of {expected}")]
    UnknownDtype {
        /// Name of the tensor, or of the field.
        tensor: String,
        /// Dtype as written.
        got: String,
        /// The known ones.
        expected: &'static str,
    },
    /// A size that does not fit 64 bits.
    #[error("`{name}`: its size does not fit 64 bits")]
    Overflow {
        /// Name of the tensor or of the size.
        name: String,
    },
    /// Shape and dtype say another length than the offsets.
    #[error("tensor `{tensor}`: data of {got} bytes, but shape and dtype need {expected}")]
    TensorLength {
        /// Name of the tensor.
        tensor: String,
        /// Length between the offsets.
        got: u64,
        /// Length by shape and dtype.
        expected: u64,
    },
    /// A hole or an overlap between two tensors, or an end before the start.
    #[error("tensor `{tensor}`: data at {got}, expected at {expected} (no holes, no overlap)")]
    TensorOffset {
        /// Name of the tensor.
        tensor: String,
        /// Offset as written.
        got: u64,
        /// Offset where the tensor before it ends.
        expected: u64,
    },
    /// A tensor or the data does not start at a multiple of
    /// [`ALIGNMENT_BYTES`](crate::ALIGNMENT_BYTES).
    #[error("`{name}` starts at byte {got}, which is not a multiple of {expected}")]
    Alignment {
        /// Name of the tensor, or `data`.
        name: String,
        /// Absolute offset in the file.
        got: u64,
        /// The alignment.
        expected: u64,
    },
    /// The file is longer or shorter than its header says.
    #[error("file has {got} bytes, its header says {expected}")]
    FileLength {
        /// Size of the file.
        got: u64,
        /// Size by the header.
        expected: u64,
    },
    /// A tensor that must be there is not, or has another dtype or shape.
    #[error("tensor `{tensor}`: {got}, expected {expected}")]
    Tensor {
        /// Name of the tensor.
        tensor: String,
        /// What is there.
        got: String,
        /// What must be there.
        expected: String,
    },
    /// A manifest of another version.
    #[error("format version {got}, this program reads version {expected}")]
    Version {
        /// Version as written.
        got: u64,
        /// Version of this program.
        expected: u32,
    },
    /// A value in the manifest that breaks a rule.
    #[error("manifest: {field} is {got}, expected {expected}")]
    Manifest {
        /// Which value, such as `layers[3].stride_bytes`.
        field: String,
        /// The value.
        got: String,
        /// The rule.
        expected: String,
    },
}
