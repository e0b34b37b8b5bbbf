//! The small files beside the weights: configs, indexes, vocabularies, read whole.
//!
//! A source may be anyone's folder: what is no regular file is not waited for, what is too long is not read.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use crate::ConvertError;

/// Longer files are none of these: the vocabulary of 256 thousand tokens and the index of the largest model have 10 MB.
pub(crate) const SMALL_FILE_BYTES_MAX: u64 = 64 << 20;

/// Opens a file, but no pipe, whose writer may never come, and no folder.
pub(crate) fn open_regular(path: &Path) -> Result<File, ConvertError> {
    let found = fs::metadata(path).map_err(ConvertError::io(path, "read"))?;
    if found.is_file() {
        File::open(path).map_err(ConvertError::io(path, "read"))
    } else {
        Err(ConvertError::checkpoint(path, "is no regular file"))
    }
}

/// Refuses the text that git leaves where a large file was not fetched.
pub(crate) fn refuse_lfs_pointer(path: &Path) -> Result<(), ConvertError> {
    let mut start = Vec::new();
    open_regular(path)?
        .take(64)
        .read_to_end(&mut start)
        .map_err(ConvertError::io(path, "read"))?;
    if start.starts_with(b"version https://git-lfs") {
        let problem =
            "is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder, \
                       or download the file";
        return Err(ConvertError::checkpoint(path, problem));
    }
    Ok(())
}

/// All bytes of a small file.
pub(crate) fn read_small(path: &Path) -> Result<Vec<u8>, ConvertError> {
    refuse_lfs_pointer(path)?;
    let mut bytes = Vec::new();
    open_regular(path)?
        .take(SMALL_FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(ConvertError::io(path, "read"))?;
    if bytes.len() as u64 > SMALL_FILE_BYTES_MAX {
        let problem = format!(
            "is larger than {SMALL_FILE_BYTES_MAX} bytes, too large for a config or a vocabulary"
        );
        return Err(ConvertError::checkpoint(path, problem));
    }
    Ok(bytes)
}

/// A small file that is a text.
pub(crate) fn read_text(path: &Path) -> Result<String, ConvertError> {
    String::from_utf8(read_small(path)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        ConvertError::checkpoint(path, format!("is no UTF-8 text from byte {at}"))
    })
}
