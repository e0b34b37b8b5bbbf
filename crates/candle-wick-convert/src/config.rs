//! The source's `config.json`, or the one made from a GGUF file's metadata: values by key, with a sentence for each
//! that is missing or wrong.
//!
//! The copy in the output folder is the same text, byte for byte, unless a value had to be changed;
//! then it is the same values in alphabetical order (numbers keep their spelling).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::value::RawValue;
use serde_json::{Map, Value};
use wick_format::{FormatError, SIZE_MAX};

use crate::source::read_text;
use crate::ConvertError;

/// Name of the file.
pub(crate) const CONFIG_FILE: &str = "config.json";

/// A parsed `config.json`.
pub(crate) struct ModelConfig {
    path: PathBuf,
    text: String,
    values: Map<String, Value>,
    /// Values that differ from the text.
    edits: BTreeMap<String, Value>,
}

impl ModelConfig {
    pub(crate) fn read(folder: &Path) -> Result<Self, ConvertError> {
        let path = folder.join(CONFIG_FILE);
        let text = read_text(&path)?;
        Self::parse(path, text)
    }

    /// A config that stands in no file of its own; `path` has what it was made from.
    pub(crate) fn made(path: &Path, values: Map<String, Value>) -> Result<Self, ConvertError> {
        let text = format!("{:#}\n", Value::Object(values));
        Self::parse(path.to_path_buf(), text)
    }

    fn parse(path: PathBuf, text: String) -> Result<Self, ConvertError> {
        let values = serde_json::from_str(&text).map_err(|source| ConvertError::Format {
            path: path.clone(),
            source: FormatError::Json {
                what: "config",
                source,
            },
        })?;
        Ok(Self {
            path,
            text,
            values,
            edits: BTreeMap::new(),
        })
    }

    /// The file with the config.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The error for a value that cannot be.
    pub(crate) fn wrong(&self, key: &str, expected: impl Into<String>) -> ConvertError {
        let got = self
            .values
            .get(key)
            .map_or_else(|| "missing".into(), Value::to_string);
        ConvertError::Config {
            path: self.path.clone(),
            key: key.into(),
            got,
            expected: expected.into(),
        }
    }

    /// Gives `key` another value, here and in the copy.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) {
        let value = value.into();
        self.edits.insert(key.to_string(), value.clone());
        self.values.insert(key.to_string(), value);
    }

    /// Gives `key` a value where it has none.
    pub(crate) fn set_default(&mut self, key: &str, value: impl Into<Value>) {
        if !self.has(key) {
            self.set(key, value);
        }
    }

    /// Gives the value of the older key `old` to `key`, unless that has one.
    pub(crate) fn rename(&mut self, old: &str, key: &str) {
        if let (Some(value), false) = (self.get(old).cloned(), self.has(key)) {
            self.set(key, value);
        }
    }

    /// The value, `None` when it is missing or null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// Whether there is a value that is not null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    pub(crate) fn text(&self, key: &str) -> Result<&str, ConvertError> {
        self.get(key)
            .and_then(Value::as_str)
            .ok_or_else(|| self.wrong(key, "a text"))
    }

    /// A size from 1 to `max`.
    fn bounded(&self, key: &str, max: usize) -> Result<usize, ConvertError> {
        self.get(key)
            .and_then(Value::as_u64)
            .and_then(|size| usize::try_from(size).ok())
            .filter(|size| (1..=max).contains(size))
            .ok_or_else(|| self.wrong(key, format!("a whole number from 1 to {max}")))
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize, ConvertError> {
        self.bounded(key, SIZE_MAX)
    }

    /// A number of layers: much less than a size, because names are made for each.
    pub(crate) fn layer_count(&self, key: &str) -> Result<usize, ConvertError> {
        self.bounded(key, 4096)
    }

    pub(crate) fn size_or(&self, key: &str, default: usize) -> Result<usize, ConvertError> {
        if self.has(key) {
            self.size(key)
        } else {
            Ok(default)
        }
    }

    /// A size that divides `whole`.
    pub(crate) fn divisor(&self, key: &str, whole: usize) -> Result<usize, ConvertError> {
        Some(self.size(key)?)
            .filter(|size| whole.is_multiple_of(*size))
            .ok_or_else(|| self.wrong(key, format!("a divisor of {whole}")))
    }

    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ConvertError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    /// The text for the copy.
    pub(crate) fn copied_text(&self) -> Result<String, ConvertError> {
        if self.edits.is_empty() {
            return Ok(self.text.clone());
        }
        let json = |source| ConvertError::Format {
            path: self.path.clone(),
            source: FormatError::Json {
                what: "config",
                source,
            },
        };
        let mut raw: BTreeMap<String, Box<RawValue>> =
            serde_json::from_str(&self.text).map_err(json)?;
        for (key, value) in &self.edits {
            raw.insert(
                key.clone(),
                RawValue::from_string(value.to_string()).map_err(json)?,
            );
        }
        let mut text = serde_json::to_string_pretty(&raw).map_err(json)?;
        text.push('\n');
        Ok(text)
    }
}
