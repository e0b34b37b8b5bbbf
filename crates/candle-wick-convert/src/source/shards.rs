//! Which weight files a source folder should have, by its index or by their names.
//!
//! In this order: `model.safetensors`; the files that `model.safetensors.index.json` names; a
//! complete sequence `NAME-00001-of-0000N.safetensors`. Pickles are never opened.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use wick_format::{is_plain_file_name, FormatError};

use super::read_text;
use crate::ConvertError;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Longest sequence of weight files that is believed.
const SEQUENCE_MAX: usize = 9999;

/// The weight files of a folder, all of them present.
pub(crate) struct Shards {
    pub(crate) names: Vec<String>,
    /// File by tensor, empty without an index.
    pub(crate) weight_map: BTreeMap<String, String>,
    pub(crate) index_path: PathBuf,
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Finds the weight files, or says what is missing.
pub(crate) fn find_shards(folder: &Path) -> Result<Shards, ConvertError> {
    let index_path = folder.join(INDEX_FILE);
    let mut weight_map = BTreeMap::new();
    let listed = if folder.join(SINGLE_FILE).exists() {
        BTreeSet::from([SINGLE_FILE.to_string()])
    } else if index_path.exists() {
        weight_map = read_index(&index_path)?;
        weight_map.values().cloned().collect()
    } else {
        numbered_files(folder)?
    };
    if listed.is_empty() {
        return Err(no_weights(folder)?);
    }
    let expected = with_holes_filled(listed);
    let missing: Vec<String> = expected
        .iter()
        .filter(|name| !folder.join(name).is_file())
        .cloned()
        .collect();
    if !missing.is_empty() {
        let (total, folder) = (expected.len(), folder.to_path_buf());
        return Err(ConvertError::MissingShards {
            folder,
            present: total - missing.len(),
            total,
            missing,
        });
    }
    Ok(Shards {
        names: expected.into_iter().collect(),
        weight_map,
        index_path,
    })
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, ConvertError> {
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
        if !is_plain_file_name(file) || !file.ends_with(".safetensors") {
            let problem = format!(
                "puts tensor `{tensor}` in `{file}`, which is not the name of a safetensors file"
            );
            return Err(ConvertError::checkpoint(path, problem));
        }
    }
    Ok(index.weight_map)
}

/// The files of the folder that are part of a numbered sequence.
fn numbered_files(folder: &Path) -> Result<BTreeSet<String>, ConvertError> {
    Ok(file_names(folder)?
        .into_iter()
        .filter(|name| is_plain_file_name(name) && sequence_of(name).is_some())
        .collect())
}

fn file_names(folder: &Path) -> Result<Vec<String>, ConvertError> {
    let read = ConvertError::io(folder, "list");
    let entries: Vec<_> = fs::read_dir(folder)
        .and_then(Iterator::collect)
        .map_err(read)?;
    let entries: Vec<fs::DirEntry> = entries;
    Ok(entries
        .iter()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect())
}

/// `NAME` and N of a file `NAME-00001-of-0000N.safetensors`.
fn sequence_of(name: &str) -> Option<(&str, usize)> {
    let (stem, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let five_digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let count = count
        .parse()
        .ok()
        .filter(|_| five_digits(number) && five_digits(count))?;
    (1..=SEQUENCE_MAX).contains(&count).then_some((stem, count))
}

/// The files together with the others of their sequences.
fn with_holes_filled(listed: BTreeSet<String>) -> BTreeSet<String> {
    let mut expected = listed.clone();
    for (stem, count) in listed
        .iter()
        .filter_map(|name| sequence_of(name))
        .collect::<BTreeSet<_>>()
    {
        let numbers = 1..=count;
        expected.extend(numbers.map(|n| format!("{stem}-{n:05}-of-{count:05}.safetensors")));
    }
    expected
}

/// The error for a folder without weights that can be read, naming those that cannot.
fn no_weights(folder: &Path) -> Result<ConvertError, ConvertError> {
    let names = file_names(folder)?;
    let any = |ending: &str| names.iter().any(|name| name.ends_with(ending));
    let problem = if any(".bin") || any(".pth") || any(".pt") {
        "has PyTorch weights only; safetensors are needed".to_string()
    } else if any(".gguf") {
        "has GGUF weights only; safetensors are needed".to_string()
    } else {
        format!("has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
    };
    Ok(ConvertError::checkpoint(folder, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_recognised() {
        assert_eq!(
            sequence_of("model-00002-of-00003.safetensors"),
            Some(("model", 3))
        );
        assert_eq!(
            sequence_of("a-b-00001-of-00001.safetensors"),
            Some(("a-b", 1))
        );
        assert_eq!(sequence_of("model.safetensors"), None);
        assert_eq!(sequence_of("model-1-of-3.safetensors"), None);
        assert_eq!(sequence_of("model-00001-of-00000.safetensors"), None);
    }

    #[test]
    fn holes_are_filled() {
        let listed = BTreeSet::from(["m-00003-of-00003.safetensors".to_string()]);
        let filled: Vec<_> = with_holes_filled(listed).into_iter().collect();
        assert_eq!(filled[0], "m-00001-of-00003.safetensors");
        assert_eq!(filled.len(), 3);
    }
}
