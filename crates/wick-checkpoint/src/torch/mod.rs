//! PyTorch weight files: zip archives, and the format that `torch.save` wrote before version 1.6.
//!
//! ```text
//! zip archive                        before zip archives
//! <root>/data.pkl     the object     pickle | magic number
//! <root>/byteorder    "little"       pickle | protocol version, 1001
//! <root>/data/<key>   a storage      pickle | byte order and sizes of the writer
//!                                    pickle | the object
//!                                    pickle | list of storage keys
//!                                    i64, elements | a storage, for each key
//! ```
//!
//! The object is a dictionary of tensors, each a view of a storage that it names by key. Pickles
//! are programs; `machine` says what of them is obeyed.

mod archive;
mod globals;
mod heap;
mod legacy;
mod machine;
mod opcode;
mod place;
mod rebuild;
mod state;

use crate::error::describe_start;
use crate::{CheckpointError, StoredTensor};

/// The tensors of a PyTorch file, by name.
///
/// They are the entries of the dictionary that was saved, or of its entry `state_dict`, `model` or
/// `module` when it holds no tensor itself. Entries that are no tensors are skipped. Tied tensors
/// share an extent; a view that is not contiguous says so by its strides. Dtypes are
/// `F64`, `F32`, `F16`, `BF16`, `I64`, `I32`, `I16`, `I8`, `U8`, `U16`, `U32`, `U64`, `BOOL`,
/// `F8_E4M3`, `F8_E5M2`, `C64` and `C128`.
///
/// # Errors
/// The file is no such file, was cut short, is big-endian or compressed, contradicts itself, or
/// has an entry that only an unknown function could make: it is named, and not run.
pub fn read_torch(file: &[u8]) -> Result<Vec<StoredTensor>, CheckpointError> {
    match file {
        [b'P', b'K', 3, 4, ..] => archive::read(file),
        [0x80, 2..=5, ..] => legacy::read(file),
        // The name of a tar archive's format, behind the first entry's numbers.
        _ if file.get(257..262) == Some(b"ustar".as_slice()) => Err(CheckpointError::Kind {
            found: "a tar archive, as PyTorch before 0.1.10 wrote".into(),
            expected: "a file of a later PyTorch",
        }),
        _ => Err(CheckpointError::Kind {
            found: describe_start(file),
            expected: "a file that torch.save wrote",
        }),
    }
}
