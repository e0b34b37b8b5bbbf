//! The conversion from start to end.
//!
//! 1. Check the source and the output folder; nothing is written.
//! 2. Hash the source.
//! 3. Write the files of the plan, each whole, noting each in the state.
//! 4. Write the manifest.
//! 5. Remove the state.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use wick_format::{FileEntry, Layout, Manifest, FORMAT_VERSION, MANIFEST_FILE, RESIDENT_FILE};

use crate::check::Checkpoint;
use crate::config::CONFIG_FILE;
use crate::meter::Meter;
use crate::output::{hash_file, read_pieces, refuse_inside, OutputFile, OutputFolder};
use crate::plan::{Body, Plan, PlannedFile};
use crate::source::{file_name, refuse_lfs_pointer};
use crate::state::{confirm_complete, job_of, refuse_others, Found, State, STATE_FILE};
use crate::tensors::write_tensors;
use crate::tokenizer::{self, Assembled, TOKENIZER_FILE};
use crate::{gguf, ConvertError, ConvertOptions, ConvertProgress, ConvertReport};

/// Files that are copied as they are, when the source has them.
pub(crate) const COPIED_FILES: [&str; 8] = [
    "added_tokens.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Stands for the job while sizes are added up: the real one is as long.
const JOB_UNKNOWN: &str = "0000000000000000";

/// Converts the checkpoint `source` into the folder `out`.
///
/// `source` is a Hugging Face folder, a GGUF file (of several parts any of them), or a folder with one.
///
/// `out` must not exist, or be empty, or hold an earlier conversion of the same source with the
/// same options: an unfinished one is taken up, for a complete one there is nothing to do.
///
/// # Errors
/// The source is no supported checkpoint or is damaged, `out` holds something else or cannot be
/// written, or the disk is full. The source is never changed, and `out` has no manifest then.
pub fn convert(
    source: &Path,
    out: &Path,
    options: &ConvertOptions,
    progress: &dyn Fn(ConvertProgress<'_>),
) -> Result<ConvertReport, ConvertError> {
    let mut checkpoint = Checkpoint::open(source, options)?;
    let copies = match &checkpoint.folder {
        Some(folder) => copies(folder)?,
        None => Vec::new(),
    };
    let tokenizer = tokenizer_of(&checkpoint)?;
    checkpoint.notes.extend(tokenizer.notes);
    refuse_inside(source, out)?;
    write_folder(checkpoint, copies, tokenizer.json, out, options, progress)
}

/// Writes the folder of a checked source, with these files copied, and this text as `tokenizer.json`.
pub(crate) fn write_folder(
    checkpoint: Checkpoint,
    copies: Vec<(PathBuf, u64)>,
    tokenizer: Option<String>,
    out: &Path,
    options: &ConvertOptions,
    progress: &dyn Fn(ConvertProgress<'_>),
) -> Result<ConvertReport, ConvertError> {
    if options.layout == Layout::Permuted {
        return Err(ConvertError::Unsupported {
            got: "layout permuted of a conversion".into(),
            supported: "neuron, channel and both; `wick reorder` makes permuted ones".into(),
        });
    }
    let found = Found::look(out)?;

    let sized = Plan::new(
        &checkpoint,
        options,
        &copies,
        tokenizer.as_deref(),
        JOB_UNKNOWN,
    )?;
    let source_paths = source_paths(&checkpoint, &copies);
    let mut source_bytes = 0;
    for path in &source_paths {
        source_bytes += fs::metadata(path)
            .map_err(ConvertError::io(path, "read"))?
            .len();
    }
    let work = Work {
        checkpoint,
        options,
        copies,
        tokenizer,
        source_paths,
        out,
    };
    if let Found::Complete(manifest) = found {
        return work.confirm(*manifest, &Meter::new(progress, source_bytes));
    }
    let meter = Meter::new(progress, source_bytes + sized.total_bytes());
    let folder = OutputFolder::open(out)?;
    work.run(&folder, &meter).inspect_err(|_| folder.undo())
}

/// Paths and sizes of the files to be copied.
pub(crate) fn copies(folder: &Path) -> Result<Vec<(PathBuf, u64)>, ConvertError> {
    let mut copies = Vec::new();
    for path in COPIED_FILES.map(|name| folder.join(name)) {
        if path.is_file() {
            refuse_lfs_pointer(&path)?;
            let len = fs::metadata(&path)
                .map_err(ConvertError::io(&path, "read"))?
                .len();
            copies.push((path, len));
        }
    }
    Ok(copies)
}

/// The tokenizer where there is none to copy: of the folder's other files, or of a GGUF file's vocabulary.
fn tokenizer_of(checkpoint: &Checkpoint) -> Result<Assembled, ConvertError> {
    match &checkpoint.folder {
        Some(folder) if !checkpoint.is_gguf || folder.join(TOKENIZER_FILE).is_file() => {
            tokenizer::assemble(folder, &checkpoint.model_type)
        }
        _ => Ok(gguf::tokenizer(&checkpoint.source)),
    }
}

/// Everything that the result depends on: config, copied files, weights.
fn source_paths(checkpoint: &Checkpoint, copies: &[(PathBuf, u64)]) -> Vec<PathBuf> {
    let folder = checkpoint.folder.as_deref();
    let config = folder.filter(|_| !checkpoint.is_gguf);
    let config = config.map(|folder| folder.join(CONFIG_FILE));
    let copied = copies.iter().map(|(path, _)| path.clone());
    let weights = checkpoint.source.paths().map(Path::to_path_buf);
    config.into_iter().chain(copied).chain(weights).collect()
}

/// A checked conversion.
struct Work<'a> {
    checkpoint: Checkpoint,
    options: &'a ConvertOptions,
    copies: Vec<(PathBuf, u64)>,
    /// The text of a `tokenizer.json` that is not copied.
    tokenizer: Option<String>,
    source_paths: Vec<PathBuf>,
    out: &'a Path,
}

impl Work<'_> {
    fn hash_sources(&self, meter: &Meter<'_>) -> Result<Vec<FileEntry>, ConvertError> {
        let hash = |path: &PathBuf| {
            let name = file_name(path);
            hash_file(path, &name, |bytes| meter.add(bytes, &name))
        };
        let made_from = self.checkpoint.made_from.iter().cloned().map(Ok);
        made_from
            .chain(self.source_paths.iter().map(hash))
            .collect()
    }

    /// For a folder with a manifest: it must be the result of this very conversion.
    fn confirm(
        &self,
        manifest: Manifest,
        meter: &Meter<'_>,
    ) -> Result<ConvertReport, ConvertError> {
        let sources = self.hash_sources(meter)?;
        let job = job_of(&sources, self.options);
        confirm_complete(self.out, &manifest, &sources, &job)?;
        // Left behind by a run that was killed after its last file; on a read-only disk it may
        // stay.
        let _left = fs::remove_file(self.out.join(STATE_FILE));
        let mut report = self.report(manifest);
        report.notes.insert(
            0,
            "the folder was complete already: nothing was written".into(),
        );
        Ok(report)
    }

    fn run(&self, folder: &OutputFolder, meter: &Meter<'_>) -> Result<ConvertReport, ConvertError> {
        let sources = self.hash_sources(meter)?;
        let job = job_of(&sources, self.options);
        let tokenizer = self.tokenizer.as_deref();
        let plan = Plan::new(
            &self.checkpoint,
            self.options,
            &self.copies,
            tokenizer,
            &job,
        )?;
        let mut state = self.take_up(folder, &plan, job)?;
        let done = state
            .finished
            .iter()
            .map(|file| file.size_bytes)
            .sum::<u64>();
        folder.check_room(plan.total_bytes().saturating_sub(done))?;
        let mut files = Vec::with_capacity(plan.files.len());
        for planned in &plan.files {
            let on_piece = |bytes| meter.add(bytes, &planned.name);
            let entry = match state.intact(folder.path(), &planned.name, on_piece) {
                Some(entry) => entry,
                None => {
                    let entry = self.write(folder, &plan, planned, meter)?;
                    state.finished.retain(|file| file.name != entry.name);
                    state.finished.push(entry.clone());
                    state.write(folder)?;
                    entry
                }
            };
            files.push(entry);
        }
        let manifest = self.manifest(plan, files, sources);
        let json = manifest.to_json();
        let readable = Manifest::parse(&json);
        assert!(
            readable.is_ok(),
            "a manifest that no reader accepts: {readable:?}"
        );
        let size_bytes = json.len() as u64;
        folder.write_file(MANIFEST_FILE, size_bytes, |file| {
            file.write(json.as_bytes())
        })?;
        folder.remove_file(STATE_FILE)?;
        Ok(self.report(manifest))
    }

    /// The state of this job: that of an earlier run, or a new one.
    fn take_up(
        &self,
        folder: &OutputFolder,
        plan: &Plan,
        job: String,
    ) -> Result<State, ConvertError> {
        let mut planned: BTreeSet<&str> =
            plan.files.iter().map(|file| file.name.as_str()).collect();
        planned.insert(MANIFEST_FILE);
        match Found::look(folder.path())? {
            Found::Unfinished(state) if state.job == job => {
                refuse_others(folder.path(), &planned)?;
                Ok(state)
            }
            Found::Nothing => {
                let state = State {
                    job,
                    finished: Vec::new(),
                };
                state.write(folder)?;
                Ok(state)
            }
            Found::Unfinished(_) => {
                let problem = "holds an unfinished conversion of another checkpoint or with other \
                               options: remove it or choose another folder";
                Err(ConvertError::output(folder.path(), problem))
            }
            Found::Complete(_) => {
                let problem = "was completed by another conversion in the meantime";
                Err(ConvertError::output(folder.path(), problem))
            }
        }
    }

    fn write(
        &self,
        folder: &OutputFolder,
        plan: &Plan,
        planned: &PlannedFile,
        meter: &Meter<'_>,
    ) -> Result<FileEntry, ConvertError> {
        let on_written = |bytes| meter.add(bytes, &planned.name);
        folder.write_file(&planned.name, planned.size_bytes, |file| {
            match &planned.body {
                Body::Text(text) => {
                    file.write(text.as_bytes())?;
                    on_written(planned.size_bytes);
                    Ok(())
                }
                Body::Copy(path) => copy(path, planned.size_bytes, file, &on_written),
                Body::Tensors(tensors) => {
                    write_tensors(&self.checkpoint, &plan.layers, tensors, file, &on_written)
                }
            }
        })
    }

    fn manifest(&self, plan: Plan, files: Vec<FileEntry>, sources: Vec<FileEntry>) -> Manifest {
        Manifest {
            format_version: FORMAT_VERSION,
            model_type: self.checkpoint.model_type.clone(),
            dtype: self.checkpoint.dtype,
            model_hash: Manifest::hash_of_records(&plan.layers, &files),
            layers: plan.layers,
            files,
            sources,
            dense_weight_bytes: self.checkpoint.dense_weight_bytes(),
            order: None,
        }
    }

    fn report(&self, manifest: Manifest) -> ConvertReport {
        let records: BTreeSet<&str> = manifest
            .layers
            .iter()
            .map(|layer| layer.file.as_str())
            .collect();
        let is_record = |file: &&FileEntry| records.contains(file.name.as_str());
        ConvertReport {
            layers: manifest.layers.len(),
            resident_bytes: manifest
                .file(RESIDENT_FILE)
                .map_or(0, |file| file.size_bytes),
            ffn_bytes: manifest
                .files
                .iter()
                .filter(is_record)
                .map(|file| file.size_bytes)
                .sum(),
            ignored_tensors: self.checkpoint.ignored_tensors.clone(),
            notes: self.checkpoint.notes.clone(),
            files: manifest.files,
        }
    }
}

/// Copies a source file, which must still have the size it had when it was looked at.
pub(crate) fn copy(
    path: &Path,
    size_bytes: u64,
    out: &mut OutputFile,
    on_written: &dyn Fn(u64),
) -> Result<(), ConvertError> {
    let mut copied = 0;
    let changed = || ConvertError::checkpoint(path, "changed while it was read");
    read_pieces(path, |piece| {
        copied += piece.len() as u64;
        if copied > size_bytes {
            return Err(changed());
        }
        out.write(piece)?;
        on_written(piece.len() as u64);
        Ok(())
    })?;
    if copied == size_bytes {
        Ok(())
    } else {
        Err(changed())
    }
}
