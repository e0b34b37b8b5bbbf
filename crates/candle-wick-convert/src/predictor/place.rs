//! Where a file of predictors is to be, asked before hours of work: a free place, or that of other predictors.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use candle_wick::PREDICTORS_FILE;
use wick_format::TensorIndex;

use crate::ConvertError;

/// A key that the metadata of every file of predictors has.
const KEY: &str = "thresholds";

/// `out`, or the file in the folder of the model, whatever that holds.
///
/// # Errors
/// `out` is something that must not be replaced: a text, a model's file, a folder, a device; or its folder is not there.
pub(super) fn place(model: &Path, out: Option<&Path>) -> Result<PathBuf, ConvertError> {
    let Some(out) = out else {
        return Ok(model.join(PREDICTORS_FILE));
    };
    let (folder, _) = super::file::place(out)?;
    if !folder.is_dir() {
        return Err(ConvertError::output(folder, "is no folder"));
    }
    let holds = match fs::symlink_metadata(out) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(out.to_owned()),
        found => found.map_err(ConvertError::io(out, "look at"))?,
    };
    // An empty file is somebody's way to keep a name.
    if holds.is_file() && (holds.len() == 0 || is_predictors(out).unwrap_or(false)) {
        return Ok(out.to_owned());
    }
    let problem = "is there already and holds no predictors: give another name";
    Err(ConvertError::output(out, problem))
}

/// Whether the file's header says so.
fn is_predictors(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let len_bytes = file.metadata()?.len();
    let mut first = [0; 8];
    file.read_exact(&mut first)?;
    let Ok(header_bytes) = TensorIndex::header_len_bytes(first, len_bytes) else {
        return Ok(false);
    };
    let mut header = vec![0; header_bytes];
    file.read_exact(&mut header)?;
    let index = TensorIndex::parse(&header, len_bytes);
    Ok(index.is_ok_and(|index| index.metadata.contains_key(KEY)))
}
