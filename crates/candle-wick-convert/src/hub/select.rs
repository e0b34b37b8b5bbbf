//! Which files of a model are fetched: config, tokenizer, and one set of weights.
//!
//! The weights are the first of these that is complete: safetensors, PyTorch's `.bin`, one GGUF file.
//! Variants (`model.fp16.safetensors`), adapters, optimizers, other frameworks and everything in
//! subfolders are never asked for. The names come from strangers: only plain ones count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Deserialize;
use wick_format::is_plain_file_name;

use super::{HubError, HubModel};
use crate::config::CONFIG_FILE;
use crate::convert::COPIED_FILES;
use crate::error::listed;

/// Weights in one file or many: the name without ending, and the ending.
const FORMATS: [(&str, &str); 2] = [("model", "safetensors"), ("pytorch_model", "bin")];

/// The files of one model.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selection {
    /// Small files beside the weights, `config.json` first.
    pub(super) companions: Vec<String>,
    pub(super) weights: Vec<String>,
    /// The only weight file, when it is a GGUF file.
    pub(super) gguf: Option<String>,
}

/// Why nothing could be selected.
#[derive(Debug)]
pub(super) enum SelectError {
    /// The rest of a sentence that starts with the model's name.
    Repo(String),
    /// An index could not be had.
    Hub(HubError),
}

impl SelectError {
    pub(super) fn in_repo(self, repo: &str) -> HubError {
        match self {
            Self::Hub(error) => error,
            Self::Repo(problem) => HubError::Repo {
                repo: repo.to_owned(),
                problem,
            },
        }
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Whether a file of the listing can be asked for: it lies in the root, and its name means the same
/// in an address and on a disk.
pub(super) fn is_fetchable(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.+=@()~,".contains(c);
    is_plain_file_name(name) && name.chars().all(good)
}

impl Selection {
    /// Selects from `names`. `file` is the GGUF file to take, `read` brings an index (`None` when it
    /// cannot be read).
    pub(super) fn of(
        names: &BTreeSet<String>,
        file: Option<&str>,
        read: impl Fn(&str) -> Result<Option<Vec<u8>>, HubError>,
    ) -> Result<Self, SelectError> {
        let companions = [CONFIG_FILE].into_iter().chain(COPIED_FILES);
        let companions = companions.filter(|&name| names.contains(name));
        let companions: Vec<String> = companions.map(str::to_owned).collect();
        let gguf = |name: String| Self {
            companions: companions.clone(),
            weights: vec![name.clone()],
            gguf: Some(name),
        };
        if let Some(file) = file {
            return asked_for(names, file).map(gguf);
        }
        let mut incomplete = None;
        for (stem, ending) in FORMATS {
            match weights(names, stem, ending, &read)? {
                Weights::Complete(weights) if names.contains(CONFIG_FILE) => {
                    return Ok(Self {
                        companions,
                        weights,
                        gguf: None,
                    })
                }
                Weights::Complete(_) => {
                    let problem =
                        format!("has weights but no {CONFIG_FILE}, which says what they are");
                    incomplete = incomplete.or(Some(problem));
                }
                Weights::Incomplete(problem) => incomplete = incomplete.or(Some(problem)),
                Weights::None => {}
            }
        }
        only_gguf(names, incomplete).map(gguf)
    }

    /// The model that these files in `folder` are.
    pub(super) fn model(&self, folder: PathBuf, note: String) -> HubModel {
        let path = match &self.gguf {
            Some(name) => folder.join(name),
            None => folder,
        };
        HubModel {
            path,
            notes: vec![note],
        }
    }
}

enum Weights {
    Complete(Vec<String>),
    Incomplete(String),
    None,
}

/// One file, or the shards that an index names, or a numbered sequence.
fn weights(
    names: &BTreeSet<String>,
    stem: &str,
    ending: &str,
    read: &impl Fn(&str) -> Result<Option<Vec<u8>>, HubError>,
) -> Result<Weights, SelectError> {
    let single = format!("{stem}.{ending}");
    if names.contains(&single) {
        return Ok(Weights::Complete(vec![single]));
    }
    let index = format!("{single}.index.json");
    let shards: BTreeSet<String> = if names.contains(&index) {
        let json = read(&index).map_err(SelectError::Hub)?;
        let parsed = json.and_then(|json| serde_json::from_slice::<Index>(&json).ok());
        match parsed {
            Some(parsed) => parsed.weight_map.into_values().collect(),
            None => return Ok(Weights::Incomplete(format!("has an unreadable {index}"))),
        }
    } else {
        numbered(names, stem, ending)
    };
    if let Some(missing) = shards.iter().find(|&shard| !names.contains(shard)) {
        let problem = format!("lacks `{missing}`, a part of its weights");
        return Ok(Weights::Incomplete(problem));
    }
    if shards.is_empty() {
        return Ok(Weights::None);
    }
    let index = Some(index).filter(|index| names.contains(index));
    Ok(Weights::Complete(index.into_iter().chain(shards).collect()))
}

/// All of `STEM-00001-of-0000N.ENDING`, when one of them is there.
fn numbered(names: &BTreeSet<String>, stem: &str, ending: &str) -> BTreeSet<String> {
    let count = names.iter().find_map(|name| {
        let rest = name.strip_prefix(stem)?.strip_prefix('-')?;
        let (_, count) = rest
            .strip_suffix(ending)?
            .strip_suffix('.')?
            .split_once("-of-")?;
        count.parse::<usize>().ok()
    });
    // One missing file is enough for the sentence: no more names than there are files, and one.
    let numbers = 1..=count.unwrap_or(0).min(names.len() + 1);
    let name = |n| format!("{stem}-{n:05}-of-{:05}.{ending}", count.unwrap_or(0));
    numbers.map(name).collect()
}

fn asked_for(names: &BTreeSet<String>, file: &str) -> Result<String, SelectError> {
    let problem = if !is_gguf(file) {
        format!(
            "is asked for `{file}`, but --file chooses among GGUF files: name one, or leave it out"
        )
    } else if names.contains(file) {
        return Ok(file.to_owned());
    } else {
        format!("has no `{file}`; {}", choice(&ggufs(names)))
    };
    Err(SelectError::Repo(problem))
}

fn only_gguf(names: &BTreeSet<String>, incomplete: Option<String>) -> Result<String, SelectError> {
    let problem = match (ggufs(names).as_slice(), incomplete) {
        ([only], _) => return Ok(only.clone()),
        ([], Some(problem)) => problem,
        ([], None) => "has no weights that can be converted: neither model*.safetensors, nor \
             pytorch_model*.bin, nor a GGUF file"
            .to_owned(),
        (several, _) => format!("needs --file NAME to say which: {}", choice(several)),
    };
    Err(SelectError::Repo(problem))
}

fn is_gguf(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with(".gguf")
}

fn ggufs(names: &BTreeSet<String>) -> Vec<String> {
    names.iter().filter(|name| is_gguf(name)).cloned().collect()
}

fn choice(ggufs: &[String]) -> String {
    if ggufs.is_empty() {
        return "it has no GGUF files".to_owned();
    }
    format!("its GGUF files are {}", listed(ggufs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(names: &[&str], file: Option<&str>) -> Result<Vec<String>, String> {
        let names = names.iter().map(|&name| name.to_owned());
        let names = names.filter(|name| is_fetchable(name)).collect();
        let index = |name: &str| {
            let (stem, ending) = match name {
                "model.safetensors.index.json" => ("shard", "safetensors"),
                _ => ("../part", "bin"),
            };
            let map =
                format!(r#"{{"weight_map": {{"a": "{stem}.{ending}", "b": "{stem}.{ending}"}}}}"#);
            Ok(Some(map.into_bytes()))
        };
        let selected = Selection::of(&names, file, index);
        selected
            .map(|selection| selection.weights)
            .map_err(|error| error.in_repo("a/b").to_string())
    }

    #[test]
    fn one_complete_set_is_taken() {
        let index = "model.safetensors.index.json";
        let [first, second] = [1, 2].map(|n| format!("pytorch_model-0000{n}-of-00002.bin"));
        let cases: [(&[&str], &[&str]); 6] = [
            (
                &["model.safetensors", "pytorch_model.bin", "x.gguf"],
                &["model.safetensors"],
            ),
            (
                &[index, "shard.safetensors", "pytorch_model.bin"],
                &[index, "shard.safetensors"],
            ),
            (
                &[index, "pytorch_model.bin", "model.fp16.safetensors"],
                &["pytorch_model.bin"],
            ),
            (
                &["onnx/model.safetensors", &first, &second],
                &[&first, &second],
            ),
            (&["model-00001-of-00002.safetensors", "x.gguf"], &["x.gguf"]),
            (
                &["model-00001-of-00001.safetensors"],
                &["model-00001-of-00001.safetensors"],
            ),
        ];
        for (names, expected) in cases {
            let names = [names, &["config.json", "flax_model.msgpack"]].concat();
            assert_eq!(select(&names, None).unwrap(), expected, "{names:?}");
        }
        assert_eq!(
            select(&["a.gguf", "b.gguf"], Some("b.gguf")).unwrap(),
            ["b.gguf"]
        );
    }

    #[test]
    fn otherwise_a_sentence_says_what_is_wrong() {
        let bin_index = "pytorch_model.bin.index.json";
        let cases: [(&[&str], Option<&str>, &str); 8] = [
            (&["config.json"], None, "no weights"),
            (&["model.safetensors"], None, "no config.json"),
            (
                &["a.gguf", "b.GGUF"],
                None,
                "--file NAME to say which: its GGUF files are a.gguf, b.GGUF",
            ),
            (
                &["a.gguf"],
                Some("c.gguf"),
                "has no `c.gguf`; its GGUF files are a.gguf",
            ),
            (
                &["x.safetensors"],
                Some("x.safetensors"),
                "among GGUF files",
            ),
            (
                &["config.json", bin_index, "../part.bin"],
                None,
                "lacks `../part.bin`",
            ),
            (
                &["model-00001-of-99999.safetensors"],
                None,
                "lacks `model-00002-of-99999",
            ),
            (
                &["model-00001-of-18446744073709551615.safetensors"],
                None,
                "lacks",
            ),
        ];
        for (names, file, part) in cases {
            let problem = select(names, file).unwrap_err();
            assert!(
                problem.starts_with("a/b ") && problem.contains(part),
                "{names:?}: {problem}"
            );
        }
    }

    #[test]
    fn names_from_strangers_are_looked_at() {
        let bad = [
            "../x.gguf",
            "/etc/x.gguf",
            "a/x.gguf",
            "x%2f.gguf",
            "x?.gguf",
            "a\\b",
            "a b",
            "",
            ".",
        ];
        assert!(!bad.into_iter().any(is_fetchable));
        assert!(is_fetchable("Model-Q4_K.M(1)+2~3.gguf"));
    }
}
