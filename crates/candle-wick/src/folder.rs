//! A converted folder, opened: its manifest, its files and the threads that read them.
//!
//! Opening checks that the conversion is finished and that every file still has the size in the manifest;
//! bytes are checked as they are read. Nothing of a model's size is loaded here.
//!
//! Not here: what is kept in DRAM (`budget`), handing tensors to models (`var_builder`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use wick_format::{
    u32_values, ColumnKind, FfnLayer, FileHasher, FormatError, Manifest, TensorExtent, TensorIndex,
};
use wick_io::{DirectIo, Engine, FlashFile, IoCounters, IoMode, Reader, READER_BOUNCE_BYTES};

use crate::error::{Error, Result};
use crate::io_options::IoOptions;
use crate::predictor_file::PredictorFile;
use crate::predictor_kind::PredictorForm;
use crate::predictors::PredictorMetadata;
use crate::stats::MatrixStats;
use crate::stored::{StoredMatrix, StreamRing};

pub use wick_format::{MANIFEST_FILE, PREDICTORS_FILE, RESIDENT_FILE};

/// A longer manifest is none: a model of 1000 layers has one of 1 MB.
const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// Opens a safetensors file and reads which tensors it has, and what it says of itself.
///
/// # Errors
/// It cannot be read, is no plain file, or its header is not one.
pub fn open_indexed(path: &Path) -> Result<(File, TensorIndex)> {
    let opened = |source| Error::Open {
        path: path.to_owned(),
        source,
    };
    let format = |source| Error::Format {
        path: path.to_owned(),
        source,
    };
    // Opening a pipe would wait for ever.
    if !std::fs::metadata(path).map_err(opened)?.is_file() {
        return Err(opened(io::Error::other("not a plain file")));
    }
    let mut file = File::open(path).map_err(opened)?;
    let len_bytes = file.metadata().map_err(opened)?.len();
    let mut first = [0; 8];
    if len_bytes >= 8 {
        file.read_exact(&mut first).map_err(opened)?;
    }
    let header_bytes = TensorIndex::header_len_bytes(first, len_bytes).map_err(format)?;
    let mut header = vec![0; header_bytes];
    file.read_exact(&mut header).map_err(opened)?;
    let index = TensorIndex::parse(&header, len_bytes).map_err(format)?;
    Ok((file, index))
}

/// One safetensors file of the folder.
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) file: FlashFile,
    pub(crate) index: TensorIndex,
}

impl TensorFile {
    pub(crate) fn open(path: PathBuf, direct: DirectIo) -> Result<Self> {
        let (_, index) = open_indexed(&path)?;
        let file = FlashFile::open(&path, direct)?;
        Ok(Self { path, file, index })
    }

    /// The bytes of a small tensor.
    pub(crate) fn bytes(&self, extent: &TensorExtent) -> Result<Vec<u8>> {
        let mut bytes = vec![0; extent.len_bytes as usize];
        self.file.read_exact_at(extent.offset_bytes, &mut bytes)?;
        Ok(bytes)
    }

    /// The values of a U32 tensor, which the index has checked to be one.
    pub(crate) fn checksums(&self, extent: &TensorExtent) -> Result<Vec<u32>> {
        let bytes = self.bytes(extent)?;
        Ok(u32_values(&bytes))
    }

    fn matrix(&self, name: &str, extent: &TensorExtent) -> Result<StoredMatrix> {
        let (blocks, checksums) = self
            .index
            .checksums_of(name)
            .map_err(|source| self.format_error(source))?;
        StoredMatrix {
            name: name.to_owned(),
            file: self.file.clone(),
            offset_bytes: extent.offset_bytes,
            rows: blocks.rows,
            row_bytes: blocks.row_bytes,
            block_rows: blocks.block_rows,
            checksums: Some(self.checksums(checksums)?),
        }
        .check(&self.path)
    }

    pub(crate) fn format_error(&self, source: FormatError) -> Error {
        Error::Format {
            path: self.path.clone(),
            source,
        }
    }
}

struct Inner {
    path: PathBuf,
    manifest: Manifest,
    reader: Reader,
    resident: TensorFile,
    predictors: Option<PredictorFile>,
    records: BTreeMap<String, TensorFile>,
    ring: Mutex<StreamRing>,
    ring_bytes: u64,
    block_bytes_max: usize,
    bytes_multiplied: AtomicU64,
}

/// An opened converted folder; clones share everything.
#[derive(Clone)]
pub struct FlashFolder(Arc<Inner>);

impl FlashFolder {
    /// Opens a finished conversion and checks its files' sizes against the manifest.
    pub fn open(path: impl AsRef<Path>, io: IoOptions) -> Result<Self> {
        Self::open_with(path, io, None)
    }

    /// As [`Self::open`], with the predictors in the file `predictors` in the place of the folder's own where one is
    /// given: one that cannot be used is an error at once.
    pub fn open_with(
        path: impl AsRef<Path>,
        io: IoOptions,
        predictors: Option<&Path>,
    ) -> Result<Self> {
        // A budget bounds the whole process, and activations are freed by other threads than will want their memory.
        wick_io::share_one_heap();
        let path = path.as_ref().to_owned();
        let manifest = read_manifest(&path)?;
        for entry in &manifest.files {
            check_size(&path.join(&entry.name), entry.size_bytes)?;
        }
        let resident = TensorFile::open(path.join(RESIDENT_FILE), io.direct)?;
        let mut records = BTreeMap::new();
        for layer in &manifest.layers {
            if !records.contains_key(&layer.file) {
                let file = TensorFile::open(path.join(&layer.file), io.direct)?;
                records.insert(layer.file.clone(), file);
            }
            let file = &records[&layer.file];
            check_records(layer, &file.index).map_err(|source| file.format_error(source))?;
        }
        let predictors = match predictors {
            None => PredictorFile::own(&path, io.direct, &manifest),
            Some(file) => Some(PredictorFile::given(file, io.direct, &manifest)?),
        };
        let mut block_bytes_max = 0;
        for (name, extent) in &resident.index.tensors {
            if !is_auxiliary(name) {
                block_bytes_max = block_bytes_max.max(resident.matrix(name, extent)?.block_bytes());
            }
        }
        if let Some(Ok((file, _))) = predictors.as_ref().map(PredictorFile::usable) {
            for (name, extent) in &file.index.tensors {
                // One that is broken is refused when it is loaded.
                if let Ok(matrix) = file.matrix(name, extent) {
                    block_bytes_max = block_bytes_max.max(matrix.block_bytes());
                }
            }
        }
        let strides = manifest.layers.iter().flat_map(strides);
        let block_bytes_max = strides.fold(block_bytes_max, usize::max);
        let matrices = resident.index.tensors.values();
        let matrix_bytes_max = matrices.map(|extent| extent.len_bytes).max();
        let ring = StreamRing::new(block_bytes_max, matrix_bytes_max.unwrap_or(0))?;
        Ok(Self(Arc::new(Inner {
            reader: io.reader(records.values().map(|file| &file.file))?,
            ring_bytes: ring.bytes(),
            block_bytes_max,
            bytes_multiplied: AtomicU64::new(0),
            ring: Mutex::new(ring),
            path,
            manifest,
            resident,
            predictors,
            records,
        })))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.0.manifest
    }

    /// The model's `config.json`, as the conversion wrote it: an edited one would give other numbers silently.
    pub fn config_json(&self) -> Result<String> {
        let path = self.0.path.join("config.json");
        let bytes = std::fs::read(&path).map_err(|source| Error::Open {
            path: path.clone(),
            source,
        })?;
        let mut hasher = FileHasher::new();
        hasher.update(&bytes);
        let (got, listed) = (hasher.hex(), self.0.manifest.file("config.json"));
        let reason = match listed {
            Some(entry) if entry.xxh3 != got => {
                let expected = &entry.xxh3;
                format!(
                    "xxh3 {got}, the manifest says {expected}: edited or damaged, convert again"
                )
            }
            _ => match String::from_utf8(bytes) {
                Ok(text) => return Ok(text),
                Err(error) => error.to_string(),
            },
        };
        Err(Error::Folder { path, reason })
    }

    /// How the record files are really read.
    pub fn io_mode(&self) -> IoMode {
        let records = self.0.records.values().next();
        records.map_or(self.0.resident.file.mode(), |file| file.file.mode())
    }

    /// Who makes the requests.
    pub fn io_engine(&self) -> Engine {
        self.0.reader.engine()
    }

    /// What products with matrices outside the records took so far.
    pub fn matrix_stats(&self) -> MatrixStats {
        let times = self.ring().times();
        MatrixStats {
            bytes_multiplied: self.0.bytes_multiplied.load(Ordering::Relaxed),
            ..times
        }
    }

    pub(crate) fn count_multiplied(&self, bytes: usize) {
        self.0
            .bytes_multiplied
            .fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The file that holds the records of layer `index`, and where in it they lie: those of neurons, or those of channels
    /// where there are no others.
    pub fn record_extent(&self, index: usize) -> Option<(&FlashFile, &TensorExtent)> {
        let layer = self.0.manifest.layers.get(index)?;
        let file = self.0.records.get(&layer.file)?;
        let (records, _) = match layer.layout.has_neurons() {
            true => layer.extents(&file.index).ok()?,
            false => layer
                .column_extents(ColumnKind::Channel, &file.index)
                .ok()??,
        };
        Some((&file.file, records))
    }

    /// Bytes and requests so far.
    pub fn io_counters(&self) -> IoCounters {
        self.0.reader.counters()
    }

    /// What is known of the folder's predictors, or of those given in their place; an error when they are broken or
    /// made for another model.
    pub fn predictors(&self) -> Result<Option<&PredictorMetadata>> {
        let usable = self.0.predictors.as_ref().map(PredictorFile::usable);
        Ok(usable.transpose()?.map(|(_, metadata)| metadata))
    }

    /// The file that the predictors lie in, when there are some that can be used.
    pub fn predictors_path(&self) -> Option<&Path> {
        self.predictor_tensors().map(|file| file.path.as_path())
    }

    /// As [`Self::predictors`], for those who need them in this form.
    pub(crate) fn needed_predictors(&self, form: PredictorForm) -> Result<&PredictorMetadata> {
        let reason = match (self.predictors()?, self.predictors_path()) {
            (Some(found), _) if found.form == form => return Ok(found),
            (Some(found), Some(path)) => format!(
                "the predictors in {} are of form {}: use that selector",
                path.display(),
                found.form
            ),
            _ => {
                let command = match form {
                    PredictorForm::LowRank => "fit",
                    PredictorForm::Gate => "gate",
                };
                let folder = self.path().display();
                format!(
                    "{folder} has no {PREDICTORS_FILE}; make it with `wick predictor {command}`"
                )
            }
        };
        let selector = form.name();
        Err(Error::Selector { selector, reason })
    }

    fn predictor_tensors(&self) -> Option<&TensorFile> {
        let usable = self.0.predictors.as_ref()?.usable();
        usable.ok().map(|(file, _)| file)
    }

    pub(crate) fn reader(&self) -> &Reader {
        &self.0.reader
    }

    pub(crate) fn ring(&self) -> MutexGuard<'_, StreamRing> {
        // A panic while reading leaves at worst an empty ring, which the next read replaces.
        self.0
            .ring
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What the reader's threads take for records that the device cannot place straight into a slot.
    pub(crate) fn bounce_bytes(&self) -> u64 {
        let layers = &self.0.manifest.layers;
        let bounces = layers.iter().any(|layer| {
            let alignment = self.0.records[&layer.file].file.alignment_bytes();
            strides(layer).any(|stride| !stride.is_multiple_of(alignment))
        });
        if bounces {
            (self.0.reader.threads() * READER_BOUNCE_BYTES) as u64
        } else {
            0
        }
    }

    /// Bytes of the largest block that any tensor is read by.
    pub(crate) fn block_bytes_max(&self) -> usize {
        self.0.block_bytes_max
    }

    pub(crate) fn ring_bytes(&self) -> u64 {
        self.0.ring_bytes
    }

    /// Name and extent of every model tensor outside the record files.
    pub fn resident_tensors(&self) -> impl Iterator<Item = (&String, &TensorExtent)> {
        self.0
            .resident
            .index
            .tensors
            .iter()
            .filter(|(name, _)| !is_auxiliary(name))
    }

    /// Bytes that all predictors take in DRAM.
    pub fn predictor_bytes(&self) -> u64 {
        let file = self.0.predictors.as_ref();
        file.map_or(0, PredictorFile::resident_bytes)
    }

    /// A tensor's extent, among the resident tensors or the predictors'.
    pub(crate) fn extent(&self, name: &str) -> Option<&TensorExtent> {
        self.tensor_file(name).map(|(_, extent)| extent)
    }

    fn tensor_file(&self, name: &str) -> Option<(&TensorFile, &TensorExtent)> {
        let files = [Some(&self.0.resident), self.predictor_tensors()];
        let mut found = files.into_iter().flatten().filter_map(|file| {
            let extent = file.index.tensors.get(name)?;
            Some((file, extent))
        });
        found.next()
    }

    /// A tensor outside the record files, ready to be read by rows.
    pub(crate) fn stored_matrix(&self, name: &str) -> Result<StoredMatrix> {
        let (file, extent) = self.tensor_file(name).ok_or_else(|| self.missing(name))?;
        file.matrix(name, extent)
    }

    /// The file with the records of `layer`.
    pub(crate) fn record_file(&self, layer: &FfnLayer) -> &TensorFile {
        &self.0.records[&layer.file]
    }

    pub(crate) fn missing(&self, name: &str) -> Error {
        Error::MissingTensor {
            name: name.to_owned(),
            path: self.0.path.clone(),
        }
    }
}

/// Distances between the records of `layer`, of whatever kind.
fn strides(layer: &FfnLayer) -> impl Iterator<Item = usize> + '_ {
    let columns = ColumnKind::ALL.map(|kind| layer.column_layout(kind));
    let columns = columns
        .into_iter()
        .flatten()
        .map(|layout| layout.stride_bytes);
    columns.chain([layer.stride_bytes])
}

/// Refuses an index that lacks records of `layer`.
fn check_records(layer: &FfnLayer, index: &TensorIndex) -> std::result::Result<(), FormatError> {
    if layer.layout.has_neurons() {
        layer.extents(index)?;
    }
    layer.order_extents(index)?;
    for kind in ColumnKind::ALL {
        layer.column_extents(kind, index)?;
    }
    Ok(())
}

/// Padding and checksums: tensors of the format, not of the model.
pub(crate) fn is_auxiliary(name: &str) -> bool {
    name.ends_with(".pad") || name.ends_with(".crc32c")
}

fn read_manifest(folder: &Path) -> Result<Manifest> {
    let path = folder.join(MANIFEST_FILE);
    let json = match read_plain_text(&path) {
        Ok(json) => json,
        Err(_) if !path.exists() => {
            return Err(Error::Folder {
                path: folder.to_owned(),
                reason: no_manifest(folder),
            });
        }
        Err(source) => return Err(Error::Open { path, source }),
    };
    Manifest::parse(&json).map_err(|source| Error::Format { path, source })
}

/// A text file of at most [`MANIFEST_BYTES_MAX`]; neither a pipe, which would be waited for, nor a device, which has no end.
fn read_plain_text(path: &Path) -> io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a plain file"));
    }
    if metadata.len() > MANIFEST_BYTES_MAX {
        let reason = format!("{} bytes, too many for a manifest", metadata.len());
        return Err(io::Error::other(reason));
    }
    std::fs::read_to_string(path)
}

/// Why there is no manifest at `folder`, and what to do.
fn no_manifest(folder: &Path) -> String {
    if folder.is_file() {
        "a file and not a converted folder: `wick convert FILE OUT` makes one of a GGUF file"
            .to_owned()
    } else if folder.join("config.json").exists() {
        format!(
            "no {MANIFEST_FILE} here: not a converted folder (`wick convert DIR OUT` makes one), or a conversion \
             that did not finish"
        )
    } else if folder.is_dir() {
        format!(
            "no {MANIFEST_FILE} here: not a converted folder, or a conversion that did not finish"
        )
    } else {
        "no such folder".to_owned()
    }
}

fn check_size(path: &Path, expected_bytes: u64) -> Result<()> {
    let metadata = std::fs::metadata(path).map_err(|source| Error::Open {
        path: path.to_owned(),
        source,
    })?;
    if metadata.len() != expected_bytes {
        let reason = format!(
            "{} bytes, the manifest says {expected_bytes}: cut short or replaced, convert again",
            metadata.len()
        );
        return Err(Error::Folder {
            path: path.to_owned(),
            reason,
        });
    }
    Ok(())
}
