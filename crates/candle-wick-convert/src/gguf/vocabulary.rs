//! The keys `tokenizer.ggml.*`: which values a tokenizer is made of (`tokenizer` makes it).

use wick_checkpoint::{CheckpointError, Metadata};

use crate::source::{file_name, SourceFolder};
use crate::tokenizer::{self, Assembled, GgufVocab};

/// The tokenizer of a GGUF file, or a note why there is none.
pub(crate) fn tokenizer(source: &SourceFolder) -> Assembled {
    let vocab = vocabulary(&source.metadata).map_err(|error| format!("cannot be read: {error}"));
    tokenizer::assemble_gguf(&file_name(&source.path), vocab)
}

fn vocabulary(metadata: &Metadata) -> Result<GgufVocab, CheckpointError> {
    let texts = |name: &str| {
        let texts: Option<Vec<&str>> = metadata.find(&key(name))?;
        Ok(texts
            .unwrap_or_default()
            .into_iter()
            .map(str::to_string)
            .collect())
    };
    let scores: Option<Vec<f64>> = metadata.find(&key("scores"))?;
    let token_types: Option<Vec<i64>> = metadata.find(&key("token_type"))?;
    let id = |name| token_id(metadata, name);
    let flag = |name| metadata.find(&key(name));
    Ok(GgufVocab {
        architecture: metadata.get::<&str>("general.architecture")?.into(),
        model: metadata.get::<&str>(&key("model"))?.into(),
        pre: metadata.find::<&str>(&key("pre"))?.map(str::to_string),
        tokens: texts("tokens")?,
        scores: scores
            .unwrap_or_default()
            .into_iter()
            .map(|score| score as f32)
            .collect(),
        // One that is no type at all is as unknown as -1.
        token_types: token_types
            .unwrap_or_default()
            .into_iter()
            .map(|number| i32::try_from(number).unwrap_or(-1))
            .collect(),
        merges: texts("merges")?,
        bos_token_id: id("bos_token_id")?,
        eos_token_id: id("eos_token_id")?,
        unknown_token_id: id("unknown_token_id")?,
        padding_token_id: id("padding_token_id")?,
        add_bos_token: flag("add_bos_token")?,
        add_eos_token: flag("add_eos_token")?,
        add_space_prefix: flag("add_space_prefix")?,
    })
}

fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

/// An id that fits its type; files have 2^32 - 1 for none.
fn token_id(metadata: &Metadata, name: &str) -> Result<Option<u32>, CheckpointError> {
    let id: Option<u64> = metadata.find(&key(name))?;
    Ok(id
        .and_then(|id| u32::try_from(id).ok())
        .filter(|&id| id != u32::MAX))
}
