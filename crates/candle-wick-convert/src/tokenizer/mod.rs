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

use std::path::Path;

use crate::ConvertError;
use settings::Settings;

pub(crate) use gguf::GgufVocab;

pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";

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

/// The tokenizer of a GGUF file, called `name`, whose vocabulary may be unreadable for a reason.
pub(crate) fn assemble_gguf(name: &str, vocab: Result<GgufVocab, String>) -> Assembled {
    match vocab.and_then(|vocab| gguf::from_gguf(&vocab)) {
        Ok(json) => json.into(),
        Err(reason) => Assembled::none(&format!("{name} {reason}")),
    }
}
