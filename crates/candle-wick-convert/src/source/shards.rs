//! Which weight files a source has, by its index or by their names.
//!
//! A file is a GGUF file, or one part of one. In a folder there are, in this order:
//!
//! 1. safetensors: `model.safetensors`; the files that `model.safetensors.index.json` names; a complete sequence
//!    `NAME-00001-of-0000N.safetensors`;
//! 2. PyTorch files: `pytorch_model.bin`; the files of `pytorch_model.bin.index.json`; a complete sequence
//!    `pytorch_model-00001-of-0000N.bin`;
//! 3. a GGUF file, whole or in such a sequence.
//!
//! The first kind of which there is a file is taken, and must be complete: a download that stopped is no reason to
//! read something else without a word. An index alone is no file: those who fetch one kind of weights often fetch
//! every `.json`. What is not taken is named in a note.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use wick_format::{is_plain_file_name, FormatError};

use super::small_file::open_regular;
use super::weight_file::Kind;
use super::{file_name, read_text};
use crate::error::listed;
use crate::ConvertError;

/// The kinds of a Hugging Face folder, the preferred one first, and what a file of all weights is called.
const HUGGING_FACE: [(Kind, &str); 2] = [
    (Kind::Safetensors, "model.safetensors"),
    (Kind::Torch, "pytorch_model.bin"),
];

/// Longest sequence of weight files that is believed.
const SEQUENCE_MAX: usize = 9999;

/// How the names of weights end, of whatever program.
const WEIGHT_ENDINGS: [&str; 11] = [
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".npz",
    ".onnx",
    ".ot",
    ".pt",
    ".pth",
    ".safetensors",
];

/// The weight files of a source, all of them present.
pub(crate) struct Shards {
    /// As the user gave it: a folder, or a GGUF file.
    pub(crate) source: PathBuf,
    /// Where the files are.
    pub(super) folder: PathBuf,
    pub(super) kind: Kind,
    pub(super) names: Vec<String>,
    /// File by tensor, empty without an index.
    pub(super) weight_map: BTreeMap<String, String>,
    pub(super) index_path: PathBuf,
    /// Other weights in the folder.
    left_out: Vec<String>,
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Shards {
    /// Finds the weight files, or says what is missing.
    pub(crate) fn find(source: &Path) -> Result<Self, ConvertError> {
        if source.is_dir() {
            Self::of_folder(source)
        } else if source.exists() {
            Self::of_file(source)
        } else {
            Err(ConvertError::checkpoint(source, "does not exist"))
        }
    }

    /// Whether the files are GGUF, which has the config and the vocabulary too.
    pub(crate) fn is_gguf(&self) -> bool {
        self.kind == Kind::Gguf
    }

    /// What says which model it is: the folder, or the first GGUF file.
    pub(super) fn described_by(&self) -> PathBuf {
        match (self.kind, self.names.first()) {
            (Kind::Gguf, Some(name)) => self.folder.join(name),
            _ => self.source.clone(),
        }
    }

    /// The folder that the user gave, `None` for a file.
    pub(crate) fn source_folder(&self) -> Option<&Path> {
        self.source.is_dir().then_some(&*self.source)
    }

    /// What the user should know about files that are not read.
    pub(crate) fn note(&self) -> Option<String> {
        let note = || format!("left out: {}", listed(&self.left_out));
        (!self.left_out.is_empty()).then(note)
    }

    fn of_folder(folder: &Path) -> Result<Self, ConvertError> {
        let present = weight_names(folder)?;
        let mut without_files = None;
        for (kind, single_file) in HUGGING_FACE {
            let index_path = folder.join(format!("{single_file}.index.json"));
            let mut weight_map = BTreeMap::new();
            let listed = if present.iter().any(|name| name == single_file) {
                BTreeSet::from([single_file.to_string()])
            } else if index_path.exists() {
                weight_map = read_index(&index_path, kind)?;
                weight_map.values().cloned().collect()
            } else {
                numbered_files(&present, kind)
            };
            if listed.iter().any(|name| folder.join(name).exists()) {
                let mut this = Self::complete(folder, folder, kind, listed, &present)?;
                (this.weight_map, this.index_path) = (weight_map, index_path);
                return Ok(this);
            }
            if !listed.is_empty() {
                without_files = without_files.or(Some((kind, listed)));
            }
        }
        let gguf = one_gguf(folder, &present)?;
        match without_files {
            _ if !gguf.is_empty() => Self::complete(folder, folder, Kind::Gguf, gguf, &present),
            Some((kind, listed)) => Self::complete(folder, folder, kind, listed, &present),
            None => Err(no_weights(folder, &present)),
        }
    }

    fn of_file(path: &Path) -> Result<Self, ConvertError> {
        let mut magic = Vec::new();
        open_regular(path)?
            .take(4)
            .read_to_end(&mut magic)
            .map_err(ConvertError::io(path, "read"))?;
        let name = file_name(path);
        if magic != b"GGUF" && !name.ends_with(Kind::Gguf.ending()) {
            let problem =
                "is not a folder, and no GGUF file: give the folder with config.json and \
                           all weight files";
            return Err(ConvertError::checkpoint(path, problem));
        }
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let listed = BTreeSet::from([name]);
        Self::complete(path, folder, Kind::Gguf, listed, &[])
    }

    /// All of `listed` and of the sequences they are part of; `present` is what else might be there.
    fn complete(
        source: &Path,
        folder: &Path,
        kind: Kind,
        listed: BTreeSet<String>,
        present: &[String],
    ) -> Result<Self, ConvertError> {
        let expected = with_holes_filled(listed, kind);
        for path in expected.iter().map(|name| folder.join(name)) {
            if path.exists() {
                open_regular(&path)?;
            }
        }
        let is_missing = |name: &&String| !folder.join(name).is_file();
        let missing: Vec<String> = expected.iter().filter(is_missing).cloned().collect();
        if !missing.is_empty() {
            return Err(ConvertError::MissingShards {
                folder: folder.to_path_buf(),
                present: expected.len() - missing.len(),
                total: expected.len(),
                missing,
            });
        }
        let left_out = |name: &&String| !expected.contains(*name);
        Ok(Self {
            source: source.to_path_buf(),
            folder: folder.to_path_buf(),
            kind,
            left_out: present.iter().filter(left_out).cloned().collect(),
            names: expected.into_iter().collect(),
            weight_map: BTreeMap::new(),
            index_path: PathBuf::new(),
        })
    }
}

impl Kind {
    /// Whether `NAME` of a sequence may be that of a model: others save adapters and optimizers so.
    fn is_model_stem(self, stem: &str) -> bool {
        match self {
            Self::Torch => stem == "pytorch_model",
            Self::Safetensors => stem != "adapter_model",
            Self::Gguf => true,
        }
    }
}

fn read_index(path: &Path, kind: Kind) -> Result<BTreeMap<String, String>, ConvertError> {
    let index: Index = serde_json::from_str(&read_text(path)?).map_err(|source| {
        let source = FormatError::Json {
            what: "index",
            source,
        };
        ConvertError::Format {
            path: path.to_path_buf(),
            source,
        }
    })?;
    for (tensor, file) in &index.weight_map {
        if !is_plain_file_name(file) || !file.ends_with(kind.ending()) {
            let ending = kind.ending();
            let problem = format!(
                "puts tensor `{tensor}` in `{file}`, which is not the name of a {ending} file"
            );
            return Err(ConvertError::checkpoint(path, problem));
        }
    }
    Ok(index.weight_map)
}

/// The files that are part of a numbered sequence.
fn numbered_files(present: &[String], kind: Kind) -> BTreeSet<String> {
    let is_part = |name: &&String| {
        let sequence = sequence_of(name, kind);
        is_plain_file_name(name) && sequence.is_some_and(|(stem, _)| kind.is_model_stem(stem))
    };
    present.iter().filter(is_part).cloned().collect()
}

/// The GGUF file of the folder, or the parts of the one that is there.
fn one_gguf(folder: &Path, present: &[String]) -> Result<BTreeSet<String>, ConvertError> {
    let files: BTreeSet<String> = present
        .iter()
        .filter(|name| name.ends_with(Kind::Gguf.ending()))
        .cloned()
        .collect();
    let models: BTreeSet<_> = files
        .iter()
        .map(|name| sequence_of(name, Kind::Gguf).ok_or(name))
        .collect();
    if models.len() > 1 {
        let names: Vec<&str> = files.iter().map(String::as_str).collect();
        let problem = format!(
            "holds several GGUF files: give one of them ({})",
            names.join(", ")
        );
        return Err(ConvertError::checkpoint(folder, problem));
    }
    Ok(files)
}

/// The names of weights in the folder, in order; among them links to nothing, and what is no file.
fn weight_names(folder: &Path) -> Result<Vec<String>, ConvertError> {
    let entries: Vec<fs::DirEntry> = fs::read_dir(folder)
        .and_then(Iterator::collect)
        .map_err(ConvertError::io(folder, "list"))?;
    let mut names: Vec<String> = entries
        .iter()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| is_weights(name))
        .collect();
    names.sort();
    Ok(names)
}

/// `NAME` and N of a file `NAME-00001-of-0000N.safetensors`.
fn sequence_of(name: &str, kind: Kind) -> Option<(&str, usize)> {
    let (stem, count) = name.strip_suffix(kind.ending())?.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let five_digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let count = count
        .parse()
        .ok()
        .filter(|_| five_digits(number) && five_digits(count))?;
    (1..=SEQUENCE_MAX).contains(&count).then_some((stem, count))
}

/// The files together with the others of their sequences.
fn with_holes_filled(listed: BTreeSet<String>, kind: Kind) -> BTreeSet<String> {
    let mut expected = listed.clone();
    for (stem, count) in listed
        .iter()
        .filter_map(|name| sequence_of(name, kind))
        .collect::<BTreeSet<_>>()
    {
        let ending = kind.ending();
        let numbers = 1..=count;
        expected.extend(numbers.map(|n| format!("{stem}-{n:05}-of-{count:05}{ending}")));
    }
    expected
}

fn is_weights(name: &str) -> bool {
    WEIGHT_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// The error for a folder without weights that can be read, naming those that cannot.
fn no_weights(folder: &Path, present: &[String]) -> ConvertError {
    let found = if present.is_empty() {
        String::new()
    } else {
        format!(" ({} are something else)", listed(present))
    };
    let problem = format!(
        "has no weights{found}: expected model.safetensors or pytorch_model.bin, whole, with an index or in numbered \
         parts, or a .gguf file"
    );
    ConvertError::checkpoint(folder, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_recognised() {
        let of = |name| sequence_of(name, Kind::Safetensors);
        assert_eq!(of("model-00002-of-00003.safetensors"), Some(("model", 3)));
        assert_eq!(of("a-b-00001-of-00001.safetensors"), Some(("a-b", 1)));
        assert_eq!(of("model.safetensors"), None);
        assert_eq!(of("model-1-of-3.safetensors"), None);
        assert_eq!(of("model-00001-of-00000.safetensors"), None);
        assert_eq!(of("model-00001-of-00003.bin"), None);
        let torch = sequence_of("pytorch_model-00001-of-00003.bin", Kind::Torch);
        assert_eq!(torch, Some(("pytorch_model", 3)));
    }

    #[test]
    fn holes_are_filled() {
        let listed = BTreeSet::from(["m-00003-of-00003.gguf".to_string()]);
        let filled: Vec<_> = with_holes_filled(listed, Kind::Gguf).into_iter().collect();
        assert_eq!(filled[0], "m-00001-of-00003.gguf");
        assert_eq!(filled.len(), 3);
    }

    #[test]
    fn adapters_and_optimizers_are_no_models() {
        let names = ["adapter_model", "optimizer", "pytorch_model"];
        let present: Vec<String> = names
            .iter()
            .flat_map(|stem| [".bin", ".safetensors"].map(|e| format!("{stem}-00001-of-00001{e}")))
            .collect();
        let torch = numbered_files(&present, Kind::Torch);
        assert_eq!(torch.len(), 1);
        assert!(!numbered_files(&present, Kind::Safetensors)
            .contains("adapter_model-00001-of-00001.safetensors"));
    }
}
