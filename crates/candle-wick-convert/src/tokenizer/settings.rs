//! What the files beside a vocabulary say about it: special tokens, and what stands around a text.
//!
//! `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`, any of which may be missing; as in
//! transformers, the second goes before the first unless the first lists `added_tokens_decoder`. A token that none of
//! them names is that of the tokenizer's class. The ids of `config.json` count for nothing: those of Falcon RW and of
//! early Phi are those of other vocabularies.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::document::{AddedToken, Template, Vocab};
use crate::source::read_small;
use crate::ConvertError;

const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";

/// Keys that name one token each.
const ROLES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
];
/// The key with a list of further ones.
const MORE: &str = "additional_special_tokens";

/// A file of keys and values; empty when there is none.
struct JsonFile {
    path: PathBuf,
    values: Map<String, Value>,
}

impl JsonFile {
    fn read(path: PathBuf) -> Result<Self, ConvertError> {
        if !path.is_file() {
            let values = Map::new();
            return Ok(Self { path, values });
        }
        let values = serde_json::from_slice(&read_small(&path)?).map_err(|error| {
            ConvertError::checkpoint(&path, format!("is no JSON object: {error}"))
        })?;
        Ok(Self { path, values })
    }

    fn wrong(&self, key: &str, expected: &str) -> ConvertError {
        ConvertError::Config {
            path: self.path.clone(),
            key: key.into(),
            got: self
                .values
                .get(key)
                .map_or_else(|| "missing".into(), Value::to_string),
            expected: expected.into(),
        }
    }

    /// The value, `None` when it is missing or null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ConvertError> {
        let flag = |value: &Value| {
            value
                .as_bool()
                .ok_or_else(|| self.wrong(key, "true or false"))
        };
        self.get(key).map(flag).transpose()
    }

    /// A token by its text or with its flags.
    fn token(&self, key: &str, value: &Value) -> Result<AddedToken, ConvertError> {
        let token = match value {
            Value::String(content) => AddedToken {
                content: content.clone(),
                ..Default::default()
            },
            other => {
                AddedToken::deserialize_from(other).ok_or_else(|| self.wrong(key, "a token"))?
            }
        };
        if token.content.is_empty() {
            return Err(self.wrong(key, "tokens with a text"));
        }
        Ok(token)
    }
}

impl AddedToken {
    fn deserialize_from(value: &Value) -> Option<Self> {
        serde::Deserialize::deserialize(value).ok()
    }
}

/// The settings of a tokenizer.
pub(super) struct Settings {
    /// `tokenizer_class`.
    pub(super) class: Option<String>,
    pub(super) model_type: String,
    pub(super) add_bos: Option<bool>,
    pub(super) add_eos: Option<bool>,
    pub(super) add_prefix_space: Option<bool>,
    /// Whether a space goes before every part of a text, or before the first one only.
    pub(super) legacy: Option<bool>,
    /// By role; `None` where a file says that there is no such token.
    named: BTreeMap<&'static str, Option<AddedToken>>,
    more: Vec<AddedToken>,
    /// By id.
    added: BTreeMap<u32, AddedToken>,
}

/// The tokens that texts are searched for, by id, and what stands around a text.
pub(super) struct Specials {
    pub(super) added_tokens: BTreeMap<u32, AddedToken>,
    pub(super) template: Template,
}

impl Settings {
    /// The settings of the checkpoint in `folder`.
    pub(super) fn read(folder: &Path, model_type: &str) -> Result<Self, ConvertError> {
        let file = JsonFile::read(folder.join(CONFIG))?;
        let map = JsonFile::read(folder.join(MAP))?;
        let listed = JsonFile::read(folder.join(ADDED))?;
        let has_decoder = file.get("added_tokens_decoder").is_some();
        let sources = if has_decoder {
            [&file, &map]
        } else {
            [&map, &file]
        };
        let mut named = BTreeMap::new();
        for role in ROLES {
            if let Some(source) = sources
                .iter()
                .find(|source| source.values.contains_key(role))
            {
                let value = source.get(role);
                let token = value.map(|value| source.token(role, value)).transpose()?;
                named.insert(role, token);
            }
        }
        let mut more = Vec::new();
        if let Some((source, value)) = sources
            .iter()
            .find_map(|source| Some((source, source.get(MORE)?)))
        {
            for value in value
                .as_array()
                .ok_or_else(|| source.wrong(MORE, "a list of tokens"))?
            {
                more.push(source.token(MORE, value)?);
            }
        }
        let class = file.get("tokenizer_class").map(|class| {
            let class = class
                .as_str()
                .ok_or_else(|| file.wrong("tokenizer_class", "a text"));
            class.map(str::to_string)
        });
        Ok(Self {
            class: class.transpose()?,
            model_type: model_type.into(),
            add_bos: file.flag("add_bos_token")?,
            add_eos: file.flag("add_eos_token")?,
            add_prefix_space: file.flag("add_prefix_space")?,
            legacy: file.flag("legacy")?,
            named,
            more,
            added: added_tokens(&file, &listed)?,
        })
    }

    /// Puts the added tokens into `vocab`; finds the special ones there. `defaults` and `add_bos_default` are those of
    /// the class.
    ///
    /// # Errors
    /// The rest of a sentence: texts begin or end with a token that the vocabulary does not have.
    pub(super) fn specials(
        &self,
        vocab: &mut Vocab,
        defaults: &[(&str, &str)],
        add_bos_default: bool,
    ) -> Result<Specials, String> {
        for (id, token) in &self.added {
            vocab.insert(*id, token.content.clone());
        }
        let ids: HashMap<&str, u32> = vocab
            .iter()
            .map(|(id, token)| (token.as_str(), *id))
            .collect();
        let mut added_tokens = self.added.clone();
        let mut found = BTreeMap::new();
        let named = ROLES
            .iter()
            .map(|role| (*role, self.named(role, &ids, defaults)));
        let more = self.more.iter().map(|token| (MORE, Some(token.clone())));
        for (role, token) in named.chain(more) {
            let Some(token) = token else { continue };
            let Some(&id) = ids.get(token.content.as_str()) else {
                continue;
            };
            let token = added_tokens.entry(id).or_insert(AddedToken { id, ..token });
            token.special = true;
            token.normalized = false;
            found.insert(role, token.clone());
        }
        let mut around = |asked: Option<bool>, default: bool, role: &str| {
            let token = found.remove(role);
            let named = self.named.get(role);
            if !asked.unwrap_or(default) || token.is_some() || named == Some(&None) {
                return Ok(token.filter(|_| asked.unwrap_or(default)));
            }
            match named.and_then(Option::as_ref) {
                None if asked.is_none() => Ok(None),
                token => {
                    let name = token.map_or(role, |token| token.content.as_str());
                    Err(format!(
                        "has no `{name}`, which is to stand around every text"
                    ))
                }
            }
        };
        let template = Template {
            bos: around(self.add_bos, add_bos_default, "bos_token")?,
            eos: around(self.add_eos, false, "eos_token")?,
        };
        Ok(Specials {
            added_tokens,
            template,
        })
    }

    /// The token of a role: the named one, or the first of the class that the vocabulary has.
    fn named(
        &self,
        role: &str,
        ids: &HashMap<&str, u32>,
        defaults: &[(&str, &str)],
    ) -> Option<AddedToken> {
        if let Some(token) = self.named.get(role) {
            return token.clone();
        }
        let by_class = defaults
            .iter()
            .find(|(known, content)| *known == role && ids.contains_key(content));
        by_class.map(|(_, content)| AddedToken {
            content: content.to_string(),
            ..Default::default()
        })
    }
}

/// Tokens with ids, of `tokenizer_config.json` and then of `added_tokens.json`.
fn added_tokens(
    file: &JsonFile,
    listed: &JsonFile,
) -> Result<BTreeMap<u32, AddedToken>, ConvertError> {
    const DECODER: &str = "added_tokens_decoder";
    let mut added = BTreeMap::new();
    if let Some(decoder) = file.get(DECODER) {
        let wrong = || file.wrong(DECODER, "tokens by id");
        for (id, value) in decoder.as_object().ok_or_else(wrong)? {
            let id = id.parse().map_err(|_| wrong())?;
            added.insert(
                id,
                AddedToken {
                    id,
                    ..file.token(DECODER, value)?
                },
            );
        }
    }
    for (content, id) in &listed.values {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id
            .filter(|_| !content.is_empty())
            .ok_or_else(|| listed.wrong(content, "the id of a token"))?;
        let content = content.clone();
        added.entry(id).or_insert(AddedToken {
            id,
            content,
            ..Default::default()
        });
    }
    Ok(added)
}
