//! `vocab.json` and `merges.txt`: byte-level BPE, as GPT-2, OPT and Phi have it.
//!
//! The same ids as `GPT2Tokenizer`, `CodeGenTokenizer` and `Qwen2Tokenizer` of transformers.

use std::path::Path;

use super::document::{Document, Model, Vocab};
use super::settings::Settings;
use super::split::{byte_decoder, Split};
use super::Assembled;
use crate::source::{read_small, read_text};
use crate::ConvertError;

pub(super) const VOCAB_FILE: &str = "vocab.json";
pub(super) const MERGES_FILE: &str = "merges.txt";

/// What GPT-2's class says where no file does.
const DEFAULTS: [(&str, &str); 3] = [
    ("bos_token", "<|endoftext|>"),
    ("eos_token", "<|endoftext|>"),
    ("unk_token", "<|endoftext|>"),
];
/// What OPT's files say, for checkpoints without them.
const OPT_DEFAULTS: [(&str, &str); 4] = [
    ("bos_token", "</s>"),
    ("eos_token", "</s>"),
    ("unk_token", "</s>"),
    ("pad_token", "<pad>"),
];
/// A token that only the vocabulary of Falcon has: Falcon RW uses that of GPT-2.
const FALCON_TOKEN: &str = ">>TITLE<<";

/// The tokenizer of `vocab.json` and `merges.txt` in `folder`.
pub(super) fn assemble(folder: &Path, settings: &Settings) -> Result<Assembled, ConvertError> {
    let path = folder.join(VOCAB_FILE);
    let mut vocab = read_vocab(&path)?;
    let merges_path = folder.join(MERGES_FILE);
    let merges = read_merges(&merges_path, &read_text(&merges_path)?)?;
    let name = match split_name(settings, &vocab) {
        Ok(name) => name,
        Err(reason) => {
            return Ok(Assembled::none(&format!(
                "{VOCAB_FILE} is there, but {reason}"
            )))
        }
    };
    let add_prefix_space = settings.add_prefix_space.unwrap_or(false);
    let Some(split) = Split::named(name, add_prefix_space) else {
        return Ok(Assembled::none(&format!(
            "{VOCAB_FILE} is there, but `{name}` is not known"
        )));
    };
    let is_opt = settings.model_type == "opt";
    let defaults: &[_] = if is_opt { &OPT_DEFAULTS } else { &DEFAULTS };
    let broken = |problem| ConvertError::checkpoint(&path, problem);
    let specials = settings
        .specials(&mut vocab, defaults, is_opt)
        .map_err(broken)?;
    let document = Document {
        added_tokens: specials.added_tokens,
        normalizer: split.normalizer,
        pre_tokenizer: split.pre_tokenizer,
        template: specials.template,
        decoder: byte_decoder(),
        model: Model::Bpe {
            vocab,
            merges,
            unk: None,
            byte_fallback: false,
            ignore_merges: false,
        },
    };
    document.to_json().map(Assembled::from).map_err(broken)
}

/// How the tokenizer's class cuts texts, or why that is not known.
fn split_name(settings: &Settings, vocab: &Vocab) -> Result<&'static str, String> {
    let model_type = settings.model_type.as_str();
    let class = settings
        .class
        .as_deref()
        .map(|class| class.trim_end_matches("Fast"));
    match class {
        Some("GPT2Tokenizer" | "CodeGenTokenizer") => Ok("gpt-2"),
        Some("Qwen2Tokenizer") => Ok("qwen2"),
        None | Some("PreTrainedTokenizer" | "TokenizersBackend") => match model_type {
            "falcon" if vocab.values().any(|token| token == FALCON_TOKEN) => Ok("falcon"),
            "opt" | "gpt2" | "falcon" | "phi" => Ok("gpt-2"),
            "qwen2" => Ok("qwen2"),
            other => Err(format!(
                "no file says how a {other} model cuts texts into words"
            )),
        },
        Some(other) => Err(format!("how a {other} cuts texts into words is not known")),
    }
}

fn read_vocab(path: &Path) -> Result<Vocab, ConvertError> {
    let broken = |problem: String| ConvertError::checkpoint(path, problem);
    let ids: std::collections::BTreeMap<String, u32> =
        serde_json::from_slice(&read_small(path)?)
            .map_err(|error| broken(format!("is no list of tokens with their ids: {error}")))?;
    let mut vocab = Vocab::new();
    for (token, id) in ids {
        if let Some(other) = vocab.insert(id, token) {
            let token = &vocab[&id];
            return Err(broken(format!(
                "gives the id {id} to both `{other}` and `{token}`"
            )));
        }
    }
    if vocab.is_empty() {
        return Err(broken("has no tokens".into()));
    }
    Ok(vocab)
}

/// One merge a line; a line with the version may come first.
fn read_merges(path: &Path, text: &str) -> Result<Vec<(String, String)>, ConvertError> {
    let mut merges = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.is_empty() || (index == 0 && line.starts_with("#version")) {
            continue;
        }
        let pair = line
            .split_once(' ')
            .filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '));
        let (left, right) = pair.ok_or_else(|| {
            let problem = format!("has no merge of two tokens in line {}", index + 1);
            ConvertError::checkpoint(path, problem)
        })?;
        merges.push((left.to_string(), right.to_string()));
    }
    Ok(merges)
}
