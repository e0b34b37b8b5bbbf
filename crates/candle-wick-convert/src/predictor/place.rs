//! Where a file of predictors is to be, asked before hours of work: a free place, or that of other predictors.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use candle_wick::{open_indexed, PREDICTORS_FILE};

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
    let is_predictors =
        || open_indexed(out).is_ok_and(|(_, index)| index.metadata.contains_key(KEY));
    // An empty file is somebody's way to keep a name.
    if holds.is_file() && (holds.len() == 0 || is_predictors()) {
        return Ok(out.to_owned());
    }
    let problem = "is there already and holds no predictors: give another name";
    Err(ConvertError::output(out, problem))
}
