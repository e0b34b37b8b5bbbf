//! Everything that can be wrong with another program's file, with the name and the numbers.
//!
//! The path of the file is not known here: whoever mapped it adds it.

use thiserror::Error;

/// A weight file that cannot be read, or that must not be.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file ends before something that it announces.
    #[error(
        "cut short: {what} at byte {offset_bytes} needs {needed_bytes} bytes, {left_bytes} are left"
    )]
    CutShort {
        /// What was to be read.
        what: &'static str,
        /// Where it starts, absolute in the file.
        offset_bytes: u64,
        /// Its length.
        needed_bytes: u64,
        /// What the file, or the part of it that counts, still has.
        left_bytes: u64,
    },
    /// A file of another kind, or of a version that is not read.
    #[error("{found}; expected {expected}")]
    Kind {
        /// What the file is or how it starts.
        found: String,
        /// What is read.
        expected: &'static str,
    },
    /// The zip archive's directory cannot be read.
    #[error(
        "no readable directory at the end of the zip archive, as in a file that was cut short: {source}"
    )]
    Directory {
        /// What the archive's reader says.
        source: zip::result::ZipError,
    },
    /// An entry of the zip archive breaks a rule.
    #[error("zip entry `{entry}` {problem}")]
    Entry {
        /// Name of the entry.
        entry: String,
        /// The rule and the numbers.
        problem: String,
    },
    /// A pickle that is damaged, too large, or does what weights never need.
    #[error("pickle, byte {offset_bytes}: {problem}")]
    Pickle {
        /// Where the opcode lies, absolute in the file.
        offset_bytes: u64,
        /// What it does wrong.
        problem: String,
    },
    /// Weights that are what some unknown function of a pickle returns.
    #[error("{what} is made by `{global}`, which is not known here and is never run")]
    UnknownGlobal {
        /// The entry, or `the whole file`.
        what: String,
        /// Module and name, such as `os.system`.
        global: String,
    },
    /// A pickle without a dictionary of tensors.
    #[error("no tensors: the file holds {found}, expected a dictionary of tensors")]
    NoTensors {
        /// What it holds.
        found: String,
    },
    /// A tensor whose data is missing, outside the file, or of an unknown kind.
    #[error("tensor `{tensor}`: {problem}")]
    Tensor {
        /// Name of the tensor.
        tensor: String,
        /// What is wrong with it, with the numbers.
        problem: String,
    },
    /// A storage of the format before zip archives that contradicts itself.
    #[error("storage `{key}`: {problem}")]
    Storage {
        /// Key of the storage.
        key: String,
        /// What is wrong with it, with the numbers.
        problem: String,
    },
    /// A name, a key or a text that is not there, occurs twice or has the wrong type.
    #[error("metadata `{key}` is {got}, expected {expected}")]
    Metadata {
        /// The key.
        key: String,
        /// What is there.
        got: String,
        /// What must be there.
        expected: String,
    },
    /// More of something than the rest of the file can hold, or than is ever read.
    #[error("{what} at byte {offset_bytes}: a count of {got}, at most {limit} are possible")]
    Count {
        /// What is counted.
        what: &'static str,
        /// Where the count is, absolute in the file.
        offset_bytes: u64,
        /// The count.
        got: u64,
        /// The largest one that is accepted.
        limit: u64,
    },
    /// Text that is not UTF-8.
    #[error("{what} at byte {offset_bytes} is not UTF-8")]
    Text {
        /// What the text is.
        what: &'static str,
        /// Where it starts, absolute in the file.
        offset_bytes: u64,
    },
}

/// How a file of the wrong kind starts, in words that help its owner.
pub(crate) fn describe_start(file: &[u8]) -> String {
    let start = &file[..file.len().min(8)];
    let known: [(&[u8], &str); 9] = [
        (b"", "an empty file"),
        (
            b"version ",
            "a Git LFS pointer that stands for the file (`git lfs pull` fetches it)",
        ),
        (b"<", "a web page or XML"),
        (b"PK\x03\x04", "a zip archive"),
        (b"GGUF", "a GGUF file"),
        (b"\x89HDF", "an HDF5 file"),
        (b"lmgg", "a GGML file, the format before GGUF"),
        (b"fmgg", "a GGMF file, a format before GGUF"),
        (b"tjgg", "a GGJT file, a format before GGUF"),
    ];
    let matches = |magic: &[u8]| {
        if magic.is_empty() {
            file.is_empty()
        } else {
            start.starts_with(magic)
        }
    };
    match known.iter().find(|(magic, _)| matches(magic)) {
        Some((_, name)) => (*name).to_string(),
        None => format!("a file that starts with {start:02x?}"),
    }
}
