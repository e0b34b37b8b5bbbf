//! The model inside this program: the word `demo` in place of a folder.
//!
//! On first use it is written out and converted in the user's cache folder, or in the temporary folder where
//! that cannot be written. The work happens in a process of its own, so that it does not count against the
//! budget of the run that needs it.
//!
//! Invariants:
//! - the folder appears under its name by one rename, complete, whoever else is at it and whenever it is killed;
//! - another model, tokenizer or predictor inside the program means another name.
//!
//! Not here: making the predictors; that was done once (assets/opt-9m/README.md says how).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{bail, ensure, Context, Result};
use candle_wick::{FlashFolder, IoOptions, Memory, PREDICTORS_FILE};
use candle_wick_convert::{convert, ConvertOptions};
use clap::Args;

use crate::output;

/// Its prompt, when no other is given.
pub(crate) const PROMPT: &str = "It was a dark evening, and";
/// Its budget, when no other is given.
pub(crate) const MEMORY: Memory = Memory::Percent(60.0);
/// How many tokens it writes, when nothing else is asked for.
pub(crate) const TOKENS: usize = 64;
/// Greedy text of a model this small soon goes in circles.
pub(crate) const TEMPERATURE: f64 = 0.7;

/// The checkpoint, file by file.
const CHECKPOINT: [(&str, &[u8]); 3] = [
    (
        "config.json",
        include_bytes!("../../assets/opt-9m/config.json"),
    ),
    (
        "tokenizer.json",
        include_bytes!("../../assets/opt-9m/tokenizer.json"),
    ),
    (
        "model.safetensors",
        include_bytes!("../../assets/opt-9m/model.safetensors"),
    ),
];
/// Fitted to that checkpoint; the header names the hash of its converted form.
const PREDICTORS: &[u8] = include_bytes!("../../assets/opt-9m/predictors.safetensors");
/// How much of `PREDICTORS` is its header, at least.
const PREDICTORS_HEAD_BYTES: usize = 4096;
/// Work that nobody has touched for this long was left behind by a process that was killed.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

#[derive(Args, Debug)]
pub(crate) struct PrepareDemoArgs {
    /// Folder in which to make the model's folder
    parent: PathBuf,
}

/// The converted model, made if need be.
pub(crate) fn folder() -> Result<PathBuf> {
    let name = folder_name();
    let parents = parents();
    let existing = parents.iter().map(|parent| parent.join(&name));
    if let Some(found) = existing.into_iter().find(|path| is_complete(path)) {
        return Ok(found);
    }
    let mut refusals = Vec::new();
    for parent in &parents {
        output::complain(&format!(
            "preparing the embedded model in {}",
            parent.display()
        ));
        match prepare_in_child(parent) {
            Ok(()) => return Ok(parent.join(&name)),
            Err(error) => refusals.push(format!("{error:#}")),
        }
    }
    bail!(
        "the embedded model could not be prepared: {}",
        refusals.join("; ")
    )
}

/// Where it may be, the best place first.
fn parents() -> Vec<PathBuf> {
    let cache = dirs::cache_dir().map(|cache| cache.join("candle-wick"));
    cache
        .into_iter()
        .chain([std::env::temp_dir().join("candle-wick")])
        .collect()
}

/// A name that changes with the model. The predictors' header has the hash of the converted weights and figures
/// measured with all of them; reading more would put the whole model into this process's memory.
fn folder_name() -> String {
    let head = &PREDICTORS[..PREDICTORS.len().min(PREDICTORS_HEAD_BYTES)];
    let sizes = CHECKPOINT
        .map(|(_, bytes)| bytes.len().to_le_bytes())
        .concat();
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    let pieces = [version, CHECKPOINT[0].1, &sizes, head].concat();
    // FNV-1a.
    let hash = pieces
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("demo-{hash:016x}")
}

/// Whether all files are there in full; a cleaner of cache folders may have taken some.
fn is_complete(path: &Path) -> bool {
    let io = IoOptions {
        threads: 1,
        ..IoOptions::default()
    };
    let has_tokenizer = path.join("tokenizer.json").exists();
    has_tokenizer
        && FlashFolder::open(path, io)
            .is_ok_and(|folder| folder.predictors().is_ok_and(|found| found.is_some()))
}

fn prepare_in_child(parent: &Path) -> Result<()> {
    let program = std::env::current_exe().context("finding this program")?;
    let child = Command::new(program)
        .arg("prepare-demo")
        .arg(parent)
        .stdin(Stdio::null())
        .output();
    let child = child.context("starting this program")?;
    let said = String::from_utf8_lossy(&child.stderr);
    let said = said.trim().trim_start_matches("wick: ");
    ensure!(
        child.status.success(),
        "{}",
        if said.is_empty() { "killed" } else { said }
    );
    Ok(())
}

/// `wick prepare-demo`: makes the folder inside `parent`.
pub(crate) fn prepare(args: &PrepareDemoArgs) -> Result<ExitCode> {
    prepare_in(&args.parent)?;
    Ok(ExitCode::SUCCESS)
}

fn prepare_in(parent: &Path) -> Result<()> {
    fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
    remove_abandoned(parent);
    let staging = Staging::new(parent)?;
    let result = staging
        .fill()
        .and_then(|made| put_in_place(&made, parent, &staging));
    let _left = fs::remove_dir_all(&staging.path);
    result
}

/// A folder of this process alone, beside the place where the result goes.
struct Staging {
    path: PathBuf,
}

impl Staging {
    fn new(parent: &Path) -> Result<Self> {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let name = format!(
            "{}.{}-{}.tmp",
            folder_name(),
            std::process::id(),
            now.as_nanos()
        );
        let path = parent.join(name);
        fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self { path })
    }

    /// Makes the converted folder in here.
    fn fill(&self) -> Result<PathBuf> {
        let (source, made) = (self.path.join("source"), self.path.join("model"));
        fs::create_dir(&source).with_context(|| format!("creating {}", source.display()))?;
        for (name, bytes) in CHECKPOINT {
            write(&source.join(name), bytes)?;
        }
        convert(&source, &made, &ConvertOptions::default(), &|_| ())?;
        write(&made.join(PREDICTORS_FILE), PREDICTORS)?;
        Ok(made)
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("writing {}", path.display()))
}

/// Gives the finished folder its name, unless another process did so meanwhile.
fn put_in_place(made: &Path, parent: &Path, staging: &Staging) -> Result<()> {
    let place = parent.join(folder_name());
    if place.exists() && !is_complete(&place) {
        // Some other process may move it away first.
        let _gone = fs::rename(&place, staging.path.join("damaged"));
    }
    match fs::rename(made, &place) {
        Ok(()) => Ok(()),
        Err(_) if is_complete(&place) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("creating {}", place.display())),
    }
}

fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_staging =
            name.to_string_lossy().starts_with("demo-") && name.to_string_lossy().ends_with(".tmp");
        let age = entry
            .metadata()
            .and_then(|found| found.modified())
            .map(|time| time.elapsed());
        if is_staging && matches!(age, Ok(Ok(age)) if age > ABANDONED_AFTER) {
            let _others = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_prepared_once_and_again_when_damaged() {
        let parent = tempfile::tempdir().unwrap();
        let place = parent.path().join(folder_name());
        assert!(!is_complete(&place));
        prepare_in(parent.path()).unwrap();
        assert!(is_complete(&place));
        fs::remove_file(place.join("resident.safetensors")).unwrap();
        assert!(!is_complete(&place));
        prepare_in(parent.path()).unwrap();
        assert!(is_complete(&place));
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
    }

    #[test]
    fn several_at_once_leave_one_complete_folder() {
        let parent = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| prepare_in(parent.path()).unwrap());
            }
        });
        assert!(is_complete(&parent.path().join(folder_name())));
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error() {
        let parent = tempfile::tempdir().unwrap();
        let file = parent.path().join("file");
        fs::write(&file, "in the way").unwrap();
        let error = prepare_in(&file).unwrap_err().to_string();
        assert!(error.contains("file"), "{error}");
    }
}
