//! The converted folder's `tokenizer.json`, whatever the checkpoint has instead.
//!
//! In this order: `tokenizer.json` itself (copied, not read here), `vocab.json` with `merges.txt`
//! (`byte_level`), `tokenizer.model` (`sentencepiece`); a GGUF file carries its own (`gguf`).
//!
//! - A file that is broken stops the conversion before anything is written: it is repaired or removed in a moment,
//!   and a model that takes no text would be noticed hours later.
//! - A kind that is not known is a note, and no `tokenizer.json`: token ids still work, wrong ones would go unnoticed.

mod byte_level;
mod document;
mod gguf;
mod pieces;
mod sentencepiece;
mod settings;
mod split;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod vectors;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::source::refuse_lfs_pointer;
use crate::ConvertError;
use settings::Settings;

pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";

/// Larger files are no vocabularies: those of 256 thousand tokens have 10 MB.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// A tokenizer for a folder, or why there is none.
#[derive(Default)]
pub(crate) struct Assembled {
    /// The text of `tokenizer.json`, where it is not copied.
    pub(crate) json: Option<String>,
    /// What the user should know, a sentence each.
    pub(crate) notes: Vec<String>,
}

impl Assembled {
    fn none(reason: &str) -> Self {
        Self {
            json: None,
            notes: vec![format!(
                "no {TOKENIZER_FILE}: {reason}; the converted model takes token ids (--ids) and no text"
            )],
        }
    }
}

impl From<String> for Assembled {
    fn from(json: String) -> Self {
        Self {
            json: Some(json),
            notes: Vec::new(),
        }
    }
}

/// The tokenizer of the checkpoint in `folder`, a `model_type` by its `config.json`.
///
/// # Errors
/// A file that it is made of is damaged or larger than a vocabulary can be.
pub(crate) fn assemble(folder: &Path, model_type: &str) -> Result<Assembled, ConvertError> {
    let has = |name: &str| folder.join(name).is_file();
    if has(TOKENIZER_FILE) {
        return Ok(Assembled::default());
    }
    let settings = || Settings::read(folder, model_type);
    if has(byte_level::VOCAB_FILE) && has(byte_level::MERGES_FILE) {
        return byte_level::assemble(folder, &settings()?);
    }
    if has(sentencepiece::MODEL_FILE) {
        return sentencepiece::assemble(folder, &settings()?);
    }
    Ok(Assembled::none(&format!(
        "the checkpoint has neither that file, nor {} with {}, nor {}",
        byte_level::VOCAB_FILE,
        byte_level::MERGES_FILE,
        sentencepiece::MODEL_FILE
    )))
}

/// A file that must not be larger than a vocabulary can be.
fn read_bounded(path: &Path) -> Result<Vec<u8>, ConvertError> {
    refuse_lfs_pointer(path)?;
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(ConvertError::io(path, "read"))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let problem = format!("is larger than {FILE_BYTES_MAX} bytes, too large for a tokenizer");
        return Err(ConvertError::checkpoint(path, problem));
    }
    Ok(bytes)
}

fn read_bounded_text(path: &Path) -> Result<String, ConvertError> {
    String::from_utf8(read_bounded(path)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        ConvertError::checkpoint(path, format!("is no UTF-8 text from byte {at}"))
    })
}
