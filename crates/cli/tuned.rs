//! `tune.json` beside a model: settings that `wick tune` found to be faster on this machine and disk.
//!
//! Later commands take them for defaults; a flag goes before them. They change times, never results. A file that is
//! broken, from elsewhere or out of bounds is ignored with one sentence.
//!
//! Not here: finding the settings (`tune`).

use std::fmt;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, Result};
use candle_wick::{Engine, HumanBytes};
use serde::{Deserialize, Serialize};
use wick_io::READER_THREADS_MAX;

use crate::disk::Disk;
use crate::machine::Machine;

pub(crate) const TUNE_FILE: &str = "tune.json";
/// A file with all settings has some hundred bytes.
const FILE_BYTES_MAX: u64 = 16 << 10;
const VERSION: u32 = 1;
/// From here on gap limits are alike.
const GAP_BYTES_MAX: usize = 256 << 10;
const WINDOW_TOKENS_MAX: usize = 1 << 20;

/// What replaces a default; `None` keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) io_threads: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) io_engine: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gap_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) threads: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) window_tokens: Option<usize>,
}

/// Where settings were found, and where alone they count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    processor: Option<String>,
    cpus: usize,
    disk: Option<String>,
}

/// What the settings brought.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gain {
    /// The budget that they were found with.
    pub(crate) memory: String,
    pub(crate) date: String,
    /// Milliseconds of a token in the layers tried.
    pub(crate) default_ms: f64,
    pub(crate) tuned_ms: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TuneFile {
    version: u32,
    place: Place,
    settings: Settings,
    gain: Gain,
}

impl Place {
    fn of(folder: &Path) -> Self {
        let machine = Machine::this();
        Self {
            processor: machine.processor,
            cpus: machine.cpus,
            disk: Disk::of(folder).map(|disk| disk.name()),
        }
    }
}

impl Settings {
    /// The settings beside the model in `folder`: none where there is no file.
    ///
    /// # Errors
    /// Why the file there does not count.
    pub(crate) fn beside(folder: &Path) -> Result<Self, String> {
        let path = folder.join(TUNE_FILE);
        match std::fs::metadata(&path) {
            Err(_) => return Ok(Self::default()),
            // Opening a pipe would wait for ever.
            Ok(found) if !found.is_file() => return Err("it is not a file".to_owned()),
            Ok(_) => {}
        }
        let mut json = Vec::new();
        let file = File::open(&path).map_err(|error| error.to_string())?;
        // One more than allowed tells a longer file; it may grow meanwhile.
        let mut file = file.take(FILE_BYTES_MAX + 1);
        file.read_to_end(&mut json)
            .map_err(|error| error.to_string())?;
        if json.len() as u64 > FILE_BYTES_MAX {
            return Err(format!("it has more than {FILE_BYTES_MAX} bytes"));
        }
        let found: TuneFile = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
        if found.version != VERSION {
            return Err(format!("its version is {}, not {VERSION}", found.version));
        }
        if found.place != Place::of(folder) {
            return Err("it was made on another machine or disk".to_owned());
        }
        found.settings.check(found.place.cpus)?;
        Ok(found.settings)
    }

    fn check(&self, cpus: usize) -> Result<(), String> {
        let within = |name: &str, value: Option<usize>, least: usize, most: usize| match value {
            Some(value) if !(least..=most).contains(&value) => {
                Err(format!("its {name} is {value}, not {least} to {most}"))
            }
            _ => Ok(()),
        };
        within("io_threads", self.io_threads, 1, READER_THREADS_MAX)?;
        within("gap_bytes", self.gap_bytes, 0, GAP_BYTES_MAX)?;
        within("threads", self.threads, 1, cpus)?;
        within("window_tokens", self.window_tokens, 1, WINDOW_TOKENS_MAX)?;
        match self.io_engine.as_deref().map(str::parse::<Engine>) {
            Some(Err(error)) => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    /// The engine, which was checked.
    pub(crate) fn engine(&self) -> Option<Engine> {
        self.io_engine.as_deref()?.parse().ok()
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Puts the settings beside the model, in one step.
    pub(crate) fn write(&self, folder: &Path, gain: &Gain) -> Result<()> {
        let content = TuneFile {
            version: VERSION,
            place: Place::of(folder),
            settings: self.clone(),
            gain: gain.clone(),
        };
        let path = folder.join(TUNE_FILE);
        let part = folder.join(format!("{TUNE_FILE}.{}.part", std::process::id()));
        let written = (|| {
            let mut file = File::create(&part)?;
            file.write_all(&serde_json::to_vec_pretty(&content)?)?;
            file.sync_all()?;
            std::fs::rename(&part, &path)
        })();
        if written.is_err() {
            let _not_there = std::fs::remove_file(&part);
        }
        written.with_context(|| format!("writing {}", path.display()))
    }

    /// Takes settings of an earlier run away, and says whether there were some.
    pub(crate) fn remove(folder: &Path) -> Result<bool> {
        let path = folder.join(TUNE_FILE);
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).with_context(|| format!("removing {}", path.display())),
        }
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.io_threads.map(|count| format!("{count} in flight")),
            self.io_engine.clone(),
            self.gap_bytes
                .map(|bytes| format!("gap limit {}", HumanBytes(bytes as u64))),
            self.threads.map(|count| format!("{count} compute threads")),
            self.window_tokens.map(|count| format!("window {count}")),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        match parts.is_empty() {
            true => f.write_str("defaults"),
            false => f.write_str(&parts.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Settings {
        Settings {
            io_threads: Some(64),
            io_engine: Some("io_uring".to_owned()),
            ..Settings::default()
        }
    }

    fn gain() -> Gain {
        Gain {
            memory: "50%".to_owned(),
            date: "2026-11-30".to_owned(),
            default_ms: 2.0,
            tuned_ms: 1.0,
        }
    }

    #[test]
    fn what_was_written_is_read_on_the_same_machine() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Settings::beside(folder.path()), Ok(Settings::default()));
        some().write(folder.path(), &gain()).unwrap();
        assert_eq!(Settings::beside(folder.path()), Ok(some()));
        assert_eq!(some().to_string(), "64 in flight, io_uring");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(Settings::remove(folder.path()).unwrap());
        assert!(!Settings::remove(folder.path()).unwrap());
        assert!(some().write(&folder.path().join("none"), &gain()).is_err());
    }

    #[test]
    fn other_files_are_named_and_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        some().write(folder.path(), &gain()).unwrap();
        let path = folder.path().join(TUNE_FILE);
        let good = std::fs::read_to_string(&path).unwrap();
        let cpus = format!("\"cpus\": {}", Machine::this().cpus);
        for (from, to, part) in [
            ("64", "0", "io_threads is 0"),
            ("64", "100000", "io_threads is 100000"),
            ("64", "-1", "invalid value"),
            ("io_uring", "aio", "aio"),
            ("\"version\": 1", "\"version\": 2", "version is 2"),
            ("io_threads", "io_thread", "unknown field"),
            (cpus.as_str(), "\"cpus\": 4095", "another machine"),
            ("\"tuned_ms\": 1.0", "\"tuned_ms\":", "expected value"),
        ] {
            std::fs::write(&path, good.replace(from, to)).unwrap();
            let reason = Settings::beside(folder.path()).unwrap_err();
            assert!(reason.contains(part), "{from} {to}: {reason}");
        }
        std::fs::write(&path, vec![b' '; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(Settings::beside(folder.path())
            .unwrap_err()
            .contains("more than"));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(Settings::beside(folder.path())
            .unwrap_err()
            .contains("not a file"));
    }
}
