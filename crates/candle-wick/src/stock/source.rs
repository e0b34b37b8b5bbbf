//! Where the weights come from: a converted folder, or safetensors files as they were downloaded.
//!
//! Not here: which of them stay in DRAM (`plan`), when the others are read (`store`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use candle::DType;
use wick_format::{header_len_bytes, is_plain_file_name, Dtype, FfnLayer, RawHeader, RawTensor};
use wick_io::{FlashFile, Reader};
use wick_kernels::WeightDtype;

use super::buffer::Buffer;
use crate::error::{Error, Result};
use crate::folder::{FlashFolder, MANIFEST_FILE};
use crate::io_options::IoOptions;
use crate::neurons::kernel_dtype;
use crate::records::Records;
use crate::stored::{StoredMatrix, StreamRing};
use crate::var_builder::{ffn_matrix, FfnPart};

/// Bytes of plain tensors that are read as one block.
const BLOCK_BYTES: usize = 64 * 1024;

/// The weights of one model.
pub(super) enum StockSource {
    Folder(FlashFolder),
    Files {
        files: Vec<FlashFile>,
        /// File and place of each tensor.
        tensors: BTreeMap<String, (usize, RawTensor)>,
        reader: Reader,
    },
}

/// What is read together: one matrix, or the matrices of an FFN that lie in the same records.
pub(super) enum Extents {
    Plain(StoredMatrix, WeightDtype),
    Records {
        records: Records,
        layer: Box<FfnLayer>,
        /// Which part of a record each matrix is.
        parts: Vec<FfnPart>,
    },
}

impl StockSource {
    /// Opens a converted folder, a folder with safetensors (one file, or an index and its files), or one file.
    pub(super) fn open(path: &Path, io: IoOptions) -> Result<Self> {
        if path.join(MANIFEST_FILE).exists() {
            return Ok(Self::Folder(FlashFolder::open(path, io)?));
        }
        let mut files = Vec::new();
        let mut tensors = BTreeMap::new();
        for path in weight_files(path)? {
            for (name, tensor) in header(&path)?.tensors {
                if let Some((other, _)) = tensors.insert(name.clone(), (files.len(), tensor)) {
                    let other: &FlashFile = files.get(other).ok_or_else(|| twice(&path, &name))?;
                    return Err(twice(other.path(), &name));
                }
            }
            files.push(FlashFile::open(&path, io.direct)?);
        }
        let reader = Reader::new(io.threads)?;
        Ok(Self::Files {
            files,
            tensors,
            reader,
        })
    }

    pub(super) fn reader(&self) -> &Reader {
        match self {
            Self::Folder(folder) => folder.reader(),
            Self::Files { reader, .. } => reader,
        }
    }

    /// The shape of a tensor.
    pub(super) fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self {
            Self::Files { tensors, .. } => Some(tensors.get(name)?.1.shape.clone()),
            Self::Folder(folder) => match ffn_matrix(folder, name) {
                Some((layer, FfnPart::Down)) => {
                    Some(vec![layer.hidden_size, layer.intermediate_size])
                }
                Some((layer, _)) => Some(vec![layer.intermediate_size, layer.hidden_size]),
                None => Some(folder.extent(name)?.shape.clone()),
            },
        }
    }

    /// Bytes of the largest block of a tensor that is read by itself.
    pub(super) fn block_bytes(&self) -> usize {
        match self {
            Self::Folder(folder) => folder.block_bytes_max(),
            Self::Files { .. } => BLOCK_BYTES,
        }
    }

    /// A name that the matrices have in common that are read together.
    pub(super) fn group(&self, name: &str) -> String {
        match self {
            Self::Folder(folder) => match ffn_matrix(folder, name) {
                Some((layer, _)) => layer.neurons_tensor(),
                None => name.to_owned(),
            },
            Self::Files { .. } => name.to_owned(),
        }
    }

    /// Where `names`, matrices of one group, lie.
    pub(super) fn extents(&self, names: &[&str]) -> Result<Extents> {
        match self {
            Self::Folder(folder) => {
                let name = names.first().copied().unwrap_or_default();
                let Some((layer, _)) = ffn_matrix(folder, name) else {
                    let dtype = folder.extent(name).and_then(|extent| extent.dtype.weight());
                    let dtype = dtype.ok_or_else(|| folder.missing(name))?;
                    let stored = folder.stored_matrix(name)?;
                    return Ok(Extents::Plain(stored, kernel_dtype(dtype)));
                };
                let parts = names.iter().filter_map(|name| ffn_matrix(folder, name));
                Ok(Extents::Records {
                    records: folder.records(layer)?,
                    layer: Box::new(layer.clone()),
                    parts: parts.map(|(_, part)| part).collect(),
                })
            }
            Self::Files { files, tensors, .. } => {
                let name = names.first().copied().unwrap_or_default();
                let (file, raw) = tensors.get(name).ok_or_else(|| Error::Stock {
                    reason: format!("no tensor {name}"),
                })?;
                plain(&files[*file], name, raw)
            }
        }
    }
}

fn twice(path: &Path, name: &str) -> Error {
    Error::Folder {
        path: path.to_owned(),
        reason: format!("holds tensor {name}, and so does another file"),
    }
}

/// A tensor of a safetensors file as rows of one value.
fn plain(file: &FlashFile, name: &str, raw: &RawTensor) -> Result<Extents> {
    let refuse = |reason: String| Error::Folder {
        path: file.path().to_owned(),
        reason,
    };
    let dtype = Dtype::try_from(raw.dtype.as_str())
        .map_err(|_| refuse(format!("tensor {name} is {}, not a weight", raw.dtype)))?;
    let dtype = kernel_dtype(dtype);
    // Each value is a row, so that no shape makes a row too long to be buffered.
    let value_bytes = dtype.size_bytes();
    let stored = StoredMatrix {
        name: name.to_owned(),
        file: file.clone(),
        offset_bytes: raw.offset_bytes,
        rows: raw.len_bytes as usize / value_bytes,
        row_bytes: value_bytes,
        block_rows: BLOCK_BYTES / value_bytes,
        checksums: None,
    };
    Ok(Extents::Plain(stored.check(file.path())?, dtype))
}

impl Extents {
    /// Bytes of the largest block that is read at once.
    pub(super) fn block_bytes(&self) -> usize {
        match self {
            Self::Plain(stored, _) => stored.block_bytes(),
            Self::Records { records, .. } => records.block_bytes(),
        }
    }

    /// Reads the values of each matrix, in the order in which they were named, into `buffers`.
    pub(super) fn load(
        &self,
        reader: &Reader,
        ring: &mut StreamRing,
        buffers: &mut [Buffer],
    ) -> Result<()> {
        match self {
            Self::Plain(stored, dtype) => {
                let width = stored.row_bytes / dtype.size_bytes();
                stored.for_each_rows(reader, ring, 0..stored.rows, |rows, bytes| {
                    buffers[0].set(*dtype, bytes, rows.start * width, 1);
                    Ok(())
                })
            }
            Self::Records {
                records,
                layer,
                parts,
            } => {
                let layout = layer.record_layout();
                let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
                let dtype = kernel_dtype(layer.dtype);
                records.for_each(reader, ring, |numbers, bytes| {
                    for (number, record) in numbers.zip(bytes.chunks(layer.stride_bytes)) {
                        let neuron = records.neuron_of(number);
                        for (part, buffer) in parts.iter().zip(buffers.iter_mut()) {
                            let (range, start, step) = match part {
                                FfnPart::Gate => {
                                    let range = layout.gate_range();
                                    (range.unwrap_or(0..0), neuron * hidden, 1)
                                }
                                FfnPart::Up => (layout.up_range(), neuron * hidden, 1),
                                FfnPart::Down => (layout.down_range(), neuron, ffn),
                            };
                            buffer.set(dtype, &record[range], start, step);
                        }
                    }
                    Ok(())
                })
            }
        }
    }
}

/// One tensor as a buffer of its own.
pub(super) fn load_one(
    source: &StockSource,
    ring: &mut StreamRing,
    name: &str,
    dtype: DType,
) -> Result<Buffer> {
    let shape = source.shape(name).ok_or_else(|| Error::Stock {
        reason: format!("no tensor {name}"),
    })?;
    let extents = source.extents(&[name])?;
    let mut buffers = [Buffer::zeroed(dtype, shape.iter().product())?];
    extents.load(source.reader(), ring, &mut buffers)?;
    let [buffer] = buffers;
    Ok(buffer)
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The safetensors files at `path`.
fn weight_files(path: &Path) -> Result<Vec<PathBuf>> {
    let refuse = |path: &Path, reason: &str| Error::Folder {
        path: path.to_owned(),
        reason: reason.to_owned(),
    };
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let single = path.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let index_path = path.join("model.safetensors.index.json");
    let json = match std::fs::read_to_string(&index_path) {
        Ok(json) => json,
        Err(_) => {
            return Err(refuse(
                path,
                "neither a converted folder nor one with model.safetensors or its index",
            ))
        }
    };
    let index: Index =
        serde_json::from_str(&json).map_err(|error| refuse(&index_path, &error.to_string()))?;
    let mut names: Vec<String> = index.weight_map.into_values().collect();
    names.sort_unstable();
    names.dedup();
    if let Some(name) = names.iter().find(|name| !is_plain_file_name(name)) {
        return Err(refuse(&index_path, &format!("names a file {name:?}")));
    }
    Ok(names.iter().map(|name| path.join(name)).collect())
}

fn header(path: &Path) -> Result<RawHeader> {
    let opened = |source| Error::Open {
        path: path.to_owned(),
        source,
    };
    let format = |source| Error::Format {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(opened)?;
    let len_bytes = file.metadata().map_err(opened)?.len();
    let mut first = [0; 8];
    if len_bytes >= 8 {
        file.read_exact(&mut first).map_err(opened)?;
    }
    let mut json = vec![0; header_len_bytes(first, len_bytes).map_err(format)?];
    file.read_exact(&mut json).map_err(opened)?;
    let header = RawHeader::parse(&json).map_err(format)?;
    if header.data_end_bytes != len_bytes {
        return Err(Error::Folder {
            path: path.to_owned(),
            reason: format!(
                "{len_bytes} bytes, its header says {}: cut short or damaged",
                header.data_end_bytes
            ),
        });
    }
    Ok(header)
}
