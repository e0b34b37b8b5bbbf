//! The manifest `wick.json`: what the folder holds. A folder without it is unfinished.
//!
//! Invariants of a parsed manifest:
//! - the version is ours, and no unknown field was skipped;
//! - file names are plain names, each listed once, and every layer's file is listed;
//! - no two layers share a prefix; sizes are bounded, strides hold a record;
//! - `model_hash` is that of the record files;
//! - `order` is there when a layer is permuted, and only then;
//! - when a layer has column records, all layers are of its layout.
//!
//! Not here: whether the files are there and have these sizes and hashes.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::hash::{is_hex, FileHasher};
use crate::{Dtype, FfnLayer, FormatError, Layout};

/// The version that this crate reads and writes.
pub const FORMAT_VERSION: u32 = 1;

/// Name of the manifest in the folder.
pub const MANIFEST_FILE: &str = "wick.json";

/// Name of the file with everything that is not an FFN matrix.
pub const RESIDENT_FILE: &str = "resident.safetensors";

/// Name of the optional file with predictors.
pub const PREDICTORS_FILE: &str = "predictors.safetensors";

/// A file by name, size and content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name without folder.
    pub name: String,
    /// Size.
    pub size_bytes: u64,
    /// Hash of the content, as [`FileHasher::hex`] writes it.
    pub xxh3: String,
}

/// Where the order of permuted records comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrderOrigin {
    /// `model_hash` of the same model in the order of its neurons.
    pub model_hash: String,
    /// Hash of the trace that the order was made from.
    pub trace_xxh3: String,
}

/// The manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// `model_type` of the source's `config.json`.
    pub model_type: String,
    /// Element type of the FFN records.
    pub dtype: Dtype,
    /// [`Manifest::hash_of_records`]: the same model has the same hash everywhere.
    pub model_hash: String,
    /// The FFN layers, in the model's order.
    pub layers: Vec<FfnLayer>,
    /// The files of the folder, without the manifest and without predictors.
    pub files: Vec<FileEntry>,
    /// The files that the folder was made from.
    pub sources: Vec<FileEntry>,
    /// Bytes of all weights of the model in the stored dtypes, a tied matrix counted once.
    pub dense_weight_bytes: u64,
    /// Where the order of the records comes from, when layers are permuted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<OrderOrigin>,
}

/// What is read before anything else, so that a later version is named as such.
#[derive(Deserialize)]
struct VersionOnly {
    format_version: u64,
}

impl Manifest {
    /// Parses and checks everything that can be checked without the other files.
    ///
    /// # Errors
    /// The text is no manifest of this version, or breaks one of the invariants above.
    pub fn parse(json: &str) -> Result<Self, FormatError> {
        let in_manifest = |source| FormatError::Json {
            what: "manifest",
            source,
        };
        let version = serde_json::from_str::<VersionOnly>(json).map_err(in_manifest)?;
        if version.format_version != u64::from(FORMAT_VERSION) {
            let got = version.format_version;
            return Err(FormatError::Version {
                got,
                expected: FORMAT_VERSION,
            });
        }
        let manifest: Self = serde_json::from_str(json).map_err(in_manifest)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The manifest as indented JSON with a final line break: the same text for the same content.
    pub fn to_json(&self) -> String {
        let mut json = serde_json::to_string_pretty(self)
            .expect("strings, integers and lists always serialise");
        json.push('\n');
        json
    }

    /// The listed file of this name.
    pub fn file(&self, name: &str) -> Option<&FileEntry> {
        self.files.iter().find(|file| file.name == name)
    }

    /// What tells this model's neurons: `model_hash`, and that of the model before when records were put into another
    /// order. Predictors and traces go by the neurons' own numbers and are good for both.
    pub fn neurons_hash(&self) -> &str {
        let origin = self.order.as_ref();
        origin.map_or(&self.model_hash, |origin| &origin.model_hash)
    }

    /// The place of the layer at `prefix`, such as `model.layers.0.mlp`.
    pub fn layer_index(&self, prefix: &str) -> Option<usize> {
        self.layers.iter().position(|layer| layer.prefix == prefix)
    }

    /// The hash of the record files' hashes, in the order in which layers first name them.
    ///
    /// A file that is not in `files` counts as nothing; `parse` has refused such a manifest.
    pub fn hash_of_records(layers: &[FfnLayer], files: &[FileEntry]) -> String {
        let mut hasher = FileHasher::new();
        let mut seen = BTreeSet::new();
        for layer in layers {
            if seen.insert(&layer.file) {
                let file = files.iter().find(|file| file.name == layer.file);
                hasher.update(file.map_or("", |file| &file.xxh3).as_bytes());
            }
        }
        hasher.hex()
    }

    fn check(&self) -> Result<(), FormatError> {
        if self.model_type.is_empty() {
            return Err(fail("model_type", "empty", "a model type"));
        }
        check_files("files", &self.files)?;
        check_files("sources", &self.sources)?;
        let names: BTreeSet<&str> = self.files.iter().map(|file| file.name.as_str()).collect();
        let mut prefixes = BTreeSet::new();
        for (position, layer) in self.layers.iter().enumerate() {
            layer.check(position, self.dtype)?;
            if !prefixes.insert(&layer.prefix) {
                let field = format!("layers[{position}].prefix");
                return Err(fail(
                    &field,
                    &layer.prefix,
                    "a prefix that no other layer has",
                ));
            }
            if !names.contains(layer.file.as_str()) {
                let field = format!("layers[{position}].file");
                return Err(fail(&field, &layer.file, "a file listed in `files`"));
            }
        }
        let expected = Self::hash_of_records(&self.layers, &self.files);
        if self.model_hash != expected {
            return Err(fail("model_hash", &self.model_hash, &expected));
        }
        self.check_order()?;
        self.check_layouts()
    }

    /// Whoever plans memory for columns plans it for every layer.
    fn check_layouts(&self) -> Result<(), FormatError> {
        let with_columns = self.layers.iter().find(|layer| layer.layout.has_columns());
        let Some(layout) = with_columns.map(|layer| layer.layout) else {
            return Ok(());
        };
        let mut layers = self.layers.iter();
        match layers.position(|layer| layer.layout != layout) {
            Some(position) => {
                let field = format!("layers[{position}].layout");
                let got = self.layers[position].layout.name();
                let expected = format!("{}, as another layer's", layout.name());
                Err(fail(&field, got, &expected))
            }
            None => Ok(()),
        }
    }

    fn check_order(&self) -> Result<(), FormatError> {
        let mut layers = self.layers.iter();
        let is_permuted = layers.any(|layer| layer.layout == Layout::Permuted);
        let Some(order) = &self.order else {
            return match is_permuted {
                true => Err(fail("order", "missing", "an object, layers are permuted")),
                false => Ok(()),
            };
        };
        if !is_permuted {
            return Err(fail("order", "set", "none, no layer is permuted"));
        }
        for (key, hash) in [
            ("order.model_hash", &order.model_hash),
            ("order.trace_xxh3", &order.trace_xxh3),
        ] {
            if !is_hex(hash) {
                return Err(fail(key, hash, "16 lower-case hex digits"));
            }
        }
        Ok(())
    }
}

fn fail(field: &str, got: &str, expected: &str) -> FormatError {
    FormatError::Manifest {
        field: field.into(),
        got: got.into(),
        expected: expected.into(),
    }
}

/// Whether this is a name and not a path: not empty, no separators, no control characters, no `..`.
pub fn is_plain_file_name(name: &str) -> bool {
    let bad = |c: char| matches!(c, '/' | '\\' | ':') || c.is_control();
    !name.is_empty() && name != "." && !name.contains("..") && !name.contains(bad)
}

fn check_files(field: &str, files: &[FileEntry]) -> Result<(), FormatError> {
    let mut names = BTreeSet::new();
    for (position, file) in files.iter().enumerate() {
        let at = |key: &str| format!("{field}[{position}].{key}");
        if !is_plain_file_name(&file.name) {
            return Err(fail(&at("name"), &file.name, "a file name without folders"));
        }
        if !names.insert(&file.name) {
            return Err(fail(&at("name"), &file.name, "a name listed once"));
        }
        if !is_hex(&file.xxh3) {
            return Err(fail(&at("xxh3"), &file.xxh3, "16 lower-case hex digits"));
        }
        if file.size_bytes > i64::MAX as u64 {
            return Err(fail(
                &at("size_bytes"),
                &file.size_bytes.to_string(),
                "below 2^63",
            ));
        }
    }
    Ok(())
}
