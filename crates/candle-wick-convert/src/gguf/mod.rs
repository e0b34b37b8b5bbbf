//! GGUF files: config and tensors under the names that Hugging Face has for them.
//!
//! Facts are those of llama.cpp's converter, whose files these are. What a file does not say and what would
//! change the result is refused by name, not guessed.
//!
//! - `metadata`: one architecture's keys, with a sentence for each that is missing or wrong;
//! - `config`: from these the `config.json` of the same model;
//! - `rope`: scaled rotary frequencies;
//! - `tensors`: names, and the rows' order where llama.cpp has another one;
//! - `vocabulary`: the keys of the tokenizer.
//!
//! Not here: the bytes of the file (`wick-checkpoint`), quantised blocks (`source`).

mod config;
mod metadata;
mod rope;
mod tensors;
mod vocabulary;

use crate::config::ModelConfig;
use crate::source::{Shards, SourceFolder};
use crate::ConvertError;

pub(crate) use self::vocabulary::tokenizer;

/// What `general.architecture` may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Architecture {
    /// Llama 1 to 3, Mistral and relatives.
    Llama,
    Falcon,
    Phi2,
    Persimmon,
    Qwen2,
}

impl Architecture {
    const ALL: [(&'static str, Self); 5] = [
        ("llama", Self::Llama),
        ("falcon", Self::Falcon),
        ("phi2", Self::Phi2),
        ("persimmon", Self::Persimmon),
        ("qwen2", Self::Qwen2),
    ];

    fn of(name: &str) -> Result<Self, ConvertError> {
        let known = Self::ALL.iter().find(|(known, _)| *known == name);
        known.map(|(_, architecture)| *architecture).ok_or_else(|| {
            let supported: Vec<&str> = Self::ALL.iter().map(|(name, _)| *name).collect();
            ConvertError::Unsupported {
                got: format!("a GGUF file of architecture `{name}`"),
                supported: supported.join(", "),
            }
        })
    }
}

/// Opens GGUF files as if they were a Hugging Face folder.
pub(crate) fn open(found: &Shards) -> Result<(ModelConfig, SourceFolder), ConvertError> {
    let mut source = SourceFolder::open(found, str::to_string)?;
    let values = {
        let metadata = metadata::Described::of(&source)?;
        let model = config::Model::of(&metadata)?;
        let values = config::values(&metadata, &model)?;
        let moves = tensors::moves(&metadata, &model);
        tensors::apply(moves, &mut source)?;
        values
    };
    let config = ModelConfig::made(&source.path, values)?;
    Ok((config, source))
}
