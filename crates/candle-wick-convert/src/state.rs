//! What an output folder already holds: nothing, an unfinished conversion, or a complete one.
//!
//! While a conversion is under way, `.wick-convert.json` names its job and the files that are
//! finished. The job is a hash of the sources (names, sizes, contents) and the options, so a rerun
//! takes up exactly the same work or none. A complete folder carries the job in the metadata of
//! `resident.safetensors`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};
use wick_format::{
    FileEntry, FileHasher, FormatError, Layout, Manifest, TensorIndex, MANIFEST_FILE, RESIDENT_FILE,
};

use crate::output::{hash_file, partial_name, OutputFolder};
use crate::source::read_text;
use crate::{ConvertError, ConvertOptions};

/// Name of the state file.
pub(crate) const STATE_FILE: &str = ".wick-convert.json";

/// Key of the job in the metadata of `resident.safetensors`.
pub(crate) const JOB_KEY: &str = "wick.job";

/// Counts up when the same sources and options begin to give other bytes.
const CONVERTER_VERSION: u32 = 2;

/// The job of these sources and options.
pub(crate) fn job_of(sources: &[FileEntry], options: &ConvertOptions) -> String {
    let mut hasher = FileHasher::new();
    let mut line = |text: String| hasher.update(format!("{text}\n").as_bytes());
    line(format!("converter {CONVERTER_VERSION}"));
    line(format!(
        "dtype {}",
        options.dtype.map_or("stored", |dtype| dtype.name())
    ));
    line(format!("activation {:?}", options.activation));
    line(format!("max_file_bytes {}", options.max_file_bytes));
    // Not told of the first layout there was, so that what was converted before is known again.
    if options.layout != Layout::Neuron {
        line(format!("layout {}", options.layout.name()));
    }
    for file in sources {
        line(format!("{:?} {} {}", file.name, file.size_bytes, file.xxh3));
    }
    hasher.hex()
}

/// An unfinished conversion.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    pub(crate) job: String,
    pub(crate) finished: Vec<FileEntry>,
}

impl State {
    /// Replaces the state file.
    pub(crate) fn write(&self, folder: &OutputFolder) -> Result<(), ConvertError> {
        let json = serde_json::to_string(self).expect("strings and integers always serialise");
        let size_bytes = json.len() as u64;
        folder.write_file(STATE_FILE, size_bytes, |file| file.write(json.as_bytes()))?;
        Ok(())
    }

    /// The finished file of this name, if it still is what was written.
    pub(crate) fn intact(
        &self,
        folder: &Path,
        name: &str,
        on_piece: impl Fn(u64),
    ) -> Option<FileEntry> {
        let known = self.finished.iter().find(|file| file.name == name)?;
        let path = folder.join(name);
        let size_bytes = fs::metadata(&path).ok()?.len();
        if size_bytes != known.size_bytes {
            return None;
        }
        hash_file(&path, name, on_piece)
            .ok()
            .filter(|entry| entry == known)
    }
}

/// What is in the output folder.
pub(crate) enum Found {
    /// No folder, or nothing in it.
    Nothing,
    /// A conversion that stopped.
    Unfinished(State),
    /// A conversion with its manifest.
    Complete(Box<Manifest>),
}

impl Found {
    /// Looks into the folder; refuses one that holds something else.
    pub(crate) fn look(out: &Path) -> Result<Self, ConvertError> {
        if fs::symlink_metadata(out).is_err() {
            return Ok(Self::Nothing);
        }
        if !out.is_dir() {
            return Err(ConvertError::output(out, "exists and is not a folder"));
        }
        let manifest_path = out.join(MANIFEST_FILE);
        if manifest_path.exists() {
            let manifest = Manifest::parse(&read_text(&manifest_path)?)
                .map_err(ConvertError::format(&manifest_path))?;
            return Ok(Self::Complete(Box::new(manifest)));
        }
        let state_path = out.join(STATE_FILE);
        if state_path.exists() {
            let state = serde_json::from_str(&read_text(&state_path)?).map_err(|source| {
                let source = FormatError::Json {
                    what: "conversion state",
                    source,
                };
                ConvertError::Format {
                    path: state_path,
                    source,
                }
            })?;
            return Ok(Self::Unfinished(state));
        }
        refuse_others(out, &BTreeSet::new())?;
        Ok(Self::Nothing)
    }
}

/// Refuses a folder with entries that this conversion does not write.
pub(crate) fn refuse_others(out: &Path, planned: &BTreeSet<&str>) -> Result<(), ConvertError> {
    let list = fs::read_dir(out).map_err(ConvertError::io(out, "list"))?;
    for entry in list {
        let entry = entry.map_err(ConvertError::io(out, "list"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_ours = |known: &str| name == known || name == partial_name(known);
        let ours = planned.iter().any(|known| is_ours(known)) || is_ours(STATE_FILE);
        if !ours && name != partial_name("probe") {
            let problem = format!("already holds `{name}`: choose an empty or new folder");
            return Err(ConvertError::output(out, problem));
        }
    }
    Ok(())
}

/// Proves that a complete folder is the result of this job, with files of the right sizes.
pub(crate) fn confirm_complete(
    out: &Path,
    manifest: &Manifest,
    sources: &[FileEntry],
    job: &str,
) -> Result<(), ConvertError> {
    if manifest.sources != sources {
        let problem = "already holds a converted folder of another checkpoint: choose another one";
        return Err(ConvertError::output(out, problem));
    }
    for file in &manifest.files {
        let got = fs::metadata(out.join(&file.name)).map_or(0, |metadata| metadata.len());
        if got != file.size_bytes {
            let problem = format!(
                "holds a damaged conversion ({} has {got} of {} bytes): remove it and convert again",
                file.name, file.size_bytes
            );
            return Err(ConvertError::output(out, problem));
        }
    }
    if job_in(&out.join(RESIDENT_FILE))?.as_deref() != Some(job) {
        let problem = "already holds this checkpoint converted with other options: choose another \
                       folder";
        return Err(ConvertError::output(out, problem));
    }
    Ok(())
}

/// The job that a finished `resident.safetensors` belongs to.
fn job_in(path: &Path) -> Result<Option<String>, ConvertError> {
    let read = || ConvertError::io(path, "read");
    let mut file = File::open(path).map_err(read())?;
    let file_len = file.metadata().map_err(read())?.len();
    let mut first8 = [0; 8];
    file.read_exact(&mut first8).map_err(read())?;
    let header_len =
        TensorIndex::header_len_bytes(first8, file_len).map_err(ConvertError::format(path))?;
    let mut json = vec![0; header_len];
    file.read_exact(&mut json).map_err(read())?;
    let mut index = TensorIndex::parse(&json, file_len).map_err(ConvertError::format(path))?;
    Ok(index.metadata.remove(JOB_KEY))
}
