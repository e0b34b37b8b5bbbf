//! Scores as they come, in memory and in a file that a second start goes on from.
//!
//! The file has one JSON object a line: first the settings that scores and reads depend on, then a record for each
//! document and selector. A line is written at once when its document is done; one that was cut short by a kill is
//! dropped, be it the settings themselves. A file of another model, other predictors or other settings is refused, and so
//! is one whose documents have other tokens. A file that is none of results is left as it is.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, Seek, Write};
use std::ops::AddAssign;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::lines::Lines;
use crate::output;

/// Of the file's form.
const VERSION: u32 = 2;
/// How every settings line begins, whatever the version.
const SETTINGS_START: &[u8] = b"{\"wick_results\":";

/// What scores and reads depend on, beside selector and tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Settings {
    // The first field: a line that a kill cut short is known by it.
    pub(super) wick_results: u32,
    /// Of the program: another one may add numbers up in another order.
    pub(super) wick_version: &'static str,
    /// Instruction set of the kernels: another one's sums differ in their last bits.
    pub(super) isa: &'static str,
    /// crc32c of the folder's manifest, which has the hashes of all files.
    pub(super) model: u32,
    /// crc32c of the file of predictors that can be used, tensors and all.
    pub(super) predictors: Option<u32>,
    /// Whether special tokens, such as a BOS, precede texts.
    pub(super) special_tokens: bool,
    pub(super) ctx: usize,
    /// Density and what goes with it, of selectors that have one.
    pub(super) dip: Option<String>,
    /// crc32c of the slots of all caches, where they decide what is selected.
    pub(super) caches: Option<u32>,
    /// What follows changes nothing but what is read.
    pub(super) memory: Option<String>,
    pub(super) slots: Option<usize>,
    pub(super) window: Option<usize>,
    pub(super) cache_policy: String,
    pub(super) lookahead: String,
}

impl Settings {
    pub(super) const VERSION: u32 = VERSION;
}

/// What computing a document took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Work {
    /// Tokens that went through the model.
    pub(super) tokens: u64,
    pub(super) bytes_read: u64,
    /// Neurons selected, and those there were, summed over tokens and layers.
    pub(super) selected: u64,
    pub(super) neurons: u64,
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        // A file of results may say anything.
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.tokens, other.tokens);
        add(&mut self.bytes_read, other.bytes_read);
        add(&mut self.selected, other.selected);
        add(&mut self.neurons, other.neurons);
    }
}

/// The score of a document, or of a block of text, under one selector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) selector: String,
    pub(super) task: String,
    pub(super) doc: u64,
    /// crc32c of all tokens of all choices, and of where each continuation starts.
    pub(super) ids_crc32c: u32,
    /// `ln p` of each choice.
    #[serde(deserialize_with = "exact")]
    pub(super) logprobs: Vec<f64>,
    /// Whether greedy decoding would write each choice.
    pub(super) is_greedy: Vec<bool>,
    /// Tokens cut from the beginning of contexts that were too long.
    pub(super) cut_tokens: u64,
    pub(super) work: Work,
}

/// Numbers to the last bit, which the JSON parser does not promise.
fn exact<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    let raw = Vec::<Box<RawValue>>::deserialize(deserializer)?;
    let numbers = raw.iter().map(|number| number.get().parse());
    let numbers: Result<Vec<f64>, _> = numbers.collect();
    let numbers = numbers.map_err(serde::de::Error::custom)?;
    match numbers.iter().all(|number| number.is_finite()) {
        true => Ok(numbers),
        false => Err(serde::de::Error::custom("a number is not finite")),
    }
}

/// All records so far.
pub(super) struct Results {
    records: HashMap<(String, String, u64), Record>,
    file: Option<(File, PathBuf)>,
}

impl Results {
    /// Those of the file at `path`, which is made where it is not there; without a path, none.
    pub(super) fn open(path: Option<&Path>, settings: &Settings) -> Result<Self> {
        let Some(path) = path else {
            let (records, file) = (HashMap::new(), None);
            return Ok(Self { records, file });
        };
        let (results, cut_bytes) = Self::take_up(path, settings)?;
        if cut_bytes > 0 {
            output::note(&format!(
                "{}: dropped its last {cut_bytes} bytes, a line that was cut short",
                path.display()
            ));
        }
        Ok(results)
    }

    /// Those of the file at `path`, and how many bytes of a line that was cut short it had.
    fn take_up(path: &Path, settings: &Settings) -> Result<(Self, u64)> {
        let named = || path.display().to_string();
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true);
        let file = options.open(path).with_context(named)?;
        if file.try_lock().is_err() {
            bail!("{} is in use: another run writes it", path.display());
        }
        let mut results = Self {
            records: HashMap::new(),
            file: None,
        };
        let good_bytes = results.read(&file, path, settings)?;
        let len_bytes = file.metadata().with_context(named)?.len();
        let cut_bytes = len_bytes.saturating_sub(good_bytes);
        if cut_bytes > 0 {
            file.set_len(good_bytes).with_context(named)?;
        }
        results.file = Some((file, path.to_owned()));
        if good_bytes == 0 {
            results.write(settings)?;
        }
        Ok((results, cut_bytes))
    }

    /// Reads what is in `file`; gives where its last complete line ends.
    fn read(&mut self, mut file: &File, path: &Path, settings: &Settings) -> Result<u64> {
        let at = |number: u64| format!("{}, line {number}", path.display());
        file.rewind().with_context(|| path.display().to_string())?;
        let mut lines = Lines::new(BufReader::new(file));
        let first = lines.next_line().with_context(|| at(1))?;
        let Some((line, is_complete)) = first else {
            return Ok(0);
        };
        if !is_complete && is_cut_settings(line) {
            return Ok(0);
        }
        match serde_json::from_slice::<Map<String, Value>>(line) {
            Ok(found) if is_complete && found.contains_key("wick_results") => {
                check_same(&found, settings, path)?
            }
            _ => bail!(
                "{} is no file of results: its first line has no settings",
                path.display()
            ),
        }
        let mut good_bytes = lines.bytes_read();
        while let Some((line, is_complete)) = lines
            .next_line()
            .with_context(|| path.display().to_string())?
        {
            if !is_complete {
                break;
            }
            let record = serde_json::from_slice(line);
            let record: Record = record.with_context(|| at(lines.number()))?;
            good_bytes = lines.bytes_read();
            self.insert(record);
        }
        Ok(good_bytes)
    }

    fn insert(&mut self, record: Record) {
        let key = (record.selector.clone(), record.task.clone(), record.doc);
        self.records.insert(key, record);
    }

    fn write(&mut self, value: &impl Serialize) -> Result<()> {
        if let Some((file, path)) = &mut self.file {
            let mut line = serde_json::to_vec(value)?;
            line.push(b'\n');
            // One call, so that a kill leaves at most one line that is cut short.
            file.write_all(&line)
                .with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// Keeps `record`.
    pub(super) fn push(&mut self, record: Record) -> Result<()> {
        self.write(&record)?;
        self.insert(record);
        Ok(())
    }

    /// The record of a document with these tokens and so many choices, if there is one.
    ///
    /// # Errors
    /// There is one of other tokens.
    pub(super) fn get(
        &self,
        (selector, task, doc): (&str, &str, u64),
        ids_crc32c: u32,
        choices: usize,
    ) -> Result<Option<&Record>> {
        let key = (selector.to_owned(), task.to_owned(), doc);
        let Some(record) = self.records.get(&key) else {
            return Ok(None);
        };
        let is_same = record.ids_crc32c == ids_crc32c
            && record.logprobs.len() == choices
            && record.is_greedy.len() == choices;
        let file = self
            .file
            .as_ref()
            .map(|(_, path)| path.display().to_string());
        ensure!(
            is_same,
            "{}: document {doc} of {task} has other tokens now; name another file for the results",
            file.unwrap_or_default()
        );
        Ok(Some(record))
    }
}

/// Whether a first line without an end is the beginning of settings: nobody's data are lost with it.
fn is_cut_settings(line: &[u8]) -> bool {
    line.starts_with(SETTINGS_START) || SETTINGS_START.starts_with(line)
}

/// Refuses results made with other settings, naming the first that differs.
fn check_same(found: &Map<String, Value>, wanted: &Settings, path: &Path) -> Result<()> {
    let wanted = serde_json::to_value(wanted)?;
    let keys = wanted.as_object().into_iter().flat_map(Map::keys);
    // Of another version, other keys mean nothing.
    for key in std::iter::once("wick_results").chain(keys.map(String::as_str)) {
        let (found, value) = (found.get(key).unwrap_or(&Value::Null), &wanted[key]);
        ensure!(
            found == value,
            "{} was made with another {key} ({found}, now {value}); name another file for the results",
            path.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            wick_results: VERSION,
            wick_version: "0.0.1",
            isa: "scalar",
            model: 7,
            predictors: Some(9),
            special_tokens: false,
            dip: None,
            caches: None,
            ctx: 64,
            memory: Some("60%".to_owned()),
            slots: None,
            window: None,
            cache_policy: "lfu".to_owned(),
            lookahead: "off".to_owned(),
        }
    }

    fn record(doc: u64) -> Record {
        Record {
            selector: "dense".to_owned(),
            task: "piqa".to_owned(),
            doc,
            ids_crc32c: 5,
            // No parser that rounds twice gets these right.
            logprobs: vec![-0.1 - 0.2, -71.834_521_776_934_58 / 3.0],
            is_greedy: vec![true, false],
            cut_tokens: 0,
            work: Work::default(),
        }
    }

    #[test]
    fn a_second_start_finds_every_bit_and_drops_a_line_cut_short() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let mut results = Results::open(Some(&path), &settings()).unwrap();
        results.push(record(0)).unwrap();
        results.push(record(3)).unwrap();
        let busy = Results::open(Some(&path), &settings()).err().unwrap();
        assert!(busy.to_string().contains("another run"), "{busy}");
        drop(results);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let mut results = Results::open(Some(&path), &settings()).unwrap();
        let found = |results: &Results, doc| {
            let found = results.get(("dense", "piqa", doc), 5, 2).unwrap();
            found.cloned()
        };
        assert_eq!(found(&results, 0), Some(record(0)));
        assert_eq!(found(&results, 3), None);
        results.push(record(3)).unwrap();
        drop(results);
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        let results = Results::open(Some(&path), &settings()).unwrap();
        assert_eq!(found(&results, 3), Some(record(3)));
        for (crc, choices) in [(6, 2), (5, 3)] {
            let other = results.get(("dense", "piqa", 0), crc, choices);
            let error = other.unwrap_err().to_string();
            assert!(error.contains("document 0 of piqa has other tokens"));
        }
    }

    /// Cut after any byte, a file takes up what it has left, and ends up as it was.
    #[test]
    fn a_file_cut_after_any_byte_is_taken_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let docs = [0, 3];
        let write = |results: &mut Results| {
            for doc in docs {
                if results.get(("dense", "piqa", doc), 5, 2).unwrap().is_none() {
                    results.push(record(doc)).unwrap();
                }
            }
        };
        write(&mut Results::open(Some(&path), &settings()).unwrap());
        let whole = std::fs::read(&path).unwrap();
        assert!(whole.starts_with(SETTINGS_START));
        for len in 0..=whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let (mut results, cut_bytes) = Results::take_up(&path, &settings()).unwrap();
            let lines = whole[..len].iter().filter(|byte| **byte == b'\n').count();
            let cut = whole[..len].rsplit(|byte| *byte == b'\n').next().unwrap();
            assert_eq!(cut_bytes, cut.len() as u64, "{len}");
            assert_eq!(results.records.len(), lines.saturating_sub(1), "{len}");
            write(&mut results);
            assert_eq!(std::fs::read(&path).unwrap(), whole, "{len}");
        }
        // With other settings it is refused by name as soon as it has settings, and left alone.
        let other = Settings {
            predictors: None,
            ..settings()
        };
        let line_bytes = 1 + whole.iter().position(|byte| *byte == b'\n').unwrap();
        for len in line_bytes..=whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let error = Results::open(Some(&path), &other).err().unwrap();
            let error = error.to_string();
            assert!(
                error.contains("another predictors (9, now null)"),
                "{error}"
            );
            assert_eq!(std::fs::read(&path).unwrap(), whole[..len]);
        }
    }

    #[test]
    fn other_settings_and_other_files_are_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        drop(Results::open(Some(&path), &settings()).unwrap());
        let other = Settings {
            ctx: 128,
            ..settings()
        };
        let error = Results::open(Some(&path), &other)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("another ctx (64, now 128)"), "{error}");
        let old = "{\"wick_results\":1,\"model\":7}\n";
        std::fs::write(&path, old).unwrap();
        let error = Results::open(Some(&path), &settings()).err().unwrap();
        let error = error.to_string();
        assert!(error.contains("another wick_results (1, now 2)"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), old);
        let others = ["my diary", "{\"diary\":1}\n", "{\"diary", "[]\n[]\n", "{\n"];
        for text in others {
            std::fs::write(&path, text).unwrap();
            let error = Results::open(Some(&path), &settings()).err().unwrap();
            assert!(error.to_string().contains("no file of results"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        let settings_line = serde_json::to_string(&settings()).unwrap();
        let endless = serde_json::to_string(&record(0)).unwrap();
        let endless = endless.replacen("[-", "[-1e999,-", 1);
        std::fs::write(&path, format!("{settings_line}\n{endless}\n")).unwrap();
        let error = Results::open(Some(&path), &settings()).err().unwrap();
        let error = format!("{error:#}");
        assert!(
            error.contains("line 2") && error.contains("not finite"),
            "{error}"
        );
        let broken = settings_line + "\n{\"doc\":1}\n";
        std::fs::write(&path, broken).unwrap();
        let error = Results::open(Some(&path), &settings()).err().unwrap();
        let error = format!("{error:#}");
        assert!(
            error.contains("line 2") && error.contains("missing field"),
            "{error}"
        );
    }
}
