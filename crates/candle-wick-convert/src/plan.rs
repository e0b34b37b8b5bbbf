//! The plan: every file of the output folder with its size, before the first is written.
//!
//! Order: config and tokenizer files, `resident.safetensors`, the record files in layer order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use wick_format::{
    ChecksumBlocks, ColumnLayout, ColumnStrides, FfnLayer, FileLayout, FormatError, RecordLayout,
    StoredDtype, TensorSpec, RESIDENT_FILE,
};

use crate::check::Checkpoint;
use crate::config::CONFIG_FILE;
use crate::records::RecordKind;
use crate::source::file_name;
use crate::state::JOB_KEY;
use crate::tokenizer::TOKENIZER_FILE;
use crate::{ConvertError, ConvertOptions};

/// What a planned file is made of.
pub(crate) enum Body {
    /// A copy of a source file.
    Copy(PathBuf),
    /// This text.
    Text(String),
    /// Tensors of the checkpoint.
    Tensors(TensorFile),
}

/// A file to be written.
pub(crate) struct PlannedFile {
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    pub(crate) body: Body,
}

/// A safetensors file to be written.
pub(crate) struct TensorFile {
    pub(crate) layout: FileLayout,
    /// Content by tensor name; names without one are padding.
    pub(crate) contents: BTreeMap<String, Content>,
}

/// Where the bytes of an output tensor come from.
pub(crate) enum Content {
    /// The records of this layer (its position in the model) of one kind.
    Records(usize, RecordKind),
    /// The tensor of the same name, at this position in `Checkpoint::resident`.
    Plain(usize),
    /// The checksums of the tensor of this name, which lies before it.
    ChecksumsOf(String),
}

/// All files, and the layers for the manifest.
pub(crate) struct Plan {
    pub(crate) files: Vec<PlannedFile>,
    pub(crate) layers: Vec<FfnLayer>,
}

impl Plan {
    /// Plans the output. `copies` are the files to be copied, with their sizes, `tokenizer` is the text of a
    /// `tokenizer.json` that is not among them.
    pub(crate) fn new(
        checkpoint: &Checkpoint,
        options: &ConvertOptions,
        copies: &[(PathBuf, u64)],
        tokenizer: Option<&str>,
        job: &str,
    ) -> Result<Self, ConvertError> {
        let mut files = vec![text_file(CONFIG_FILE, &checkpoint.config_text)];
        files.extend(tokenizer.map(|text| text_file(TOKENIZER_FILE, text)));
        for (path, size_bytes) in copies {
            files.push(PlannedFile {
                name: file_name(path),
                size_bytes: *size_bytes,
                body: Body::Copy(path.clone()),
            });
        }
        files.push(resident_file(checkpoint, job)?);
        let (record_files, layers) = record_files(checkpoint, options)?;
        files.extend(record_files);
        Ok(Self { files, layers })
    }

    /// Bytes of all planned files.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size_bytes).sum()
    }
}

fn text_file(name: &str, text: &str) -> PlannedFile {
    PlannedFile {
        name: name.into(),
        size_bytes: text.len() as u64,
        body: Body::Text(text.into()),
    }
}

/// Matrices first, each at a multiple of 4096; then vectors; then the checksums of both.
fn resident_file(checkpoint: &Checkpoint, job: &str) -> Result<PlannedFile, ConvertError> {
    let path = Path::new(RESIDENT_FILE);
    let mut specs = Vec::new();
    let mut checksum_specs = Vec::new();
    let mut contents = BTreeMap::new();
    for want_matrix in [true, false] {
        for (position, (need, dtype)) in checkpoint.resident.iter().enumerate() {
            if (need.shape.len() >= 2) != want_matrix {
                continue;
            }
            let stored = StoredDtype::from(*dtype);
            let blocks =
                ChecksumBlocks::of(&need.shape, stored).map_err(ConvertError::format(path))?;
            let checksums = ChecksumBlocks::tensor_name(&need.name);
            specs.push(TensorSpec::new(&need.name, stored, &need.shape));
            checksum_specs.push(TensorSpec::new(
                &checksums,
                StoredDtype::U32,
                &[blocks.block_count()],
            ));
            contents.insert(need.name.clone(), Content::Plain(position));
            contents.insert(checksums, Content::ChecksumsOf(need.name.clone()));
        }
    }
    specs.extend(checksum_specs);
    let metadata = BTreeMap::from([(JOB_KEY.to_string(), job.to_string())]);
    tensor_file(RESIDENT_FILE.into(), &specs, &metadata, contents)
}

fn tensor_file(
    name: String,
    specs: &[TensorSpec],
    metadata: &BTreeMap<String, String>,
    contents: BTreeMap<String, Content>,
) -> Result<PlannedFile, ConvertError> {
    let layout =
        FileLayout::new(specs, metadata).map_err(ConvertError::format(Path::new(&name)))?;
    let size_bytes = layout.total_bytes();
    Ok(PlannedFile {
        name,
        size_bytes,
        body: Body::Tensors(TensorFile { layout, contents }),
    })
}

/// The record files: layers in order, as many a file as fit, at least one.
fn record_files(
    checkpoint: &Checkpoint,
    options: &ConvertOptions,
) -> Result<(Vec<PlannedFile>, Vec<FfnLayer>), ConvertError> {
    let mut layers = Vec::with_capacity(checkpoint.layers.len());
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut group_bytes: u64 = 0;
    for position in 0..checkpoint.layers.len() {
        let layer = ffn_layer(checkpoint, options, position)?;
        let kinds = RecordKind::of(&layer).into_iter();
        let shapes = kinds.map(|kind| kind.shape(&layer));
        let bytes: u64 = shapes
            .map(|[count, stride]| count as u64 * (stride as u64 + 4))
            .sum();
        match groups.last_mut() {
            Some(group) if group_bytes.saturating_add(bytes) <= options.max_file_bytes => {
                group.push(position);
                group_bytes += bytes;
            }
            _ => {
                groups.push(vec![position]);
                group_bytes = bytes;
            }
        }
        layers.push(layer);
    }
    let file_count = groups.len();
    let mut files = Vec::with_capacity(file_count);
    for (number, group) in groups.into_iter().enumerate() {
        let name = format!("ffn-{:05}-of-{file_count:05}.safetensors", number + 1);
        for &position in &group {
            layers[position].file.clone_from(&name);
        }
        files.push(record_file(name, &layers, &group)?);
    }
    Ok((files, layers))
}

fn record_file(
    name: String,
    layers: &[FfnLayer],
    group: &[usize],
) -> Result<PlannedFile, ConvertError> {
    let mut specs = Vec::new();
    let mut contents = BTreeMap::new();
    let mut checksum_specs = Vec::new();
    for &position in group {
        let layer = &layers[position];
        for kind in RecordKind::of(layer) {
            let (tensor, shape) = (kind.tensor(layer), kind.shape(layer));
            let checksums = ChecksumBlocks::tensor_name(&tensor);
            specs.push(TensorSpec::new(&tensor, StoredDtype::U8, &shape));
            checksum_specs.push(TensorSpec::new(&checksums, StoredDtype::U32, &shape[..1]));
            contents.insert(checksums, Content::ChecksumsOf(tensor.clone()));
            contents.insert(tensor, Content::Records(position, kind));
        }
    }
    specs.extend(checksum_specs);
    tensor_file(name, &specs, &BTreeMap::new(), contents)
}

/// The layer as the manifest will describe it, still without its file.
fn ffn_layer(
    checkpoint: &Checkpoint,
    options: &ConvertOptions,
    position: usize,
) -> Result<FfnLayer, ConvertError> {
    let spec = &checkpoint.layers[position];
    let (hidden_size, intermediate_size) = (checkpoint.hidden_size, spec.intermediate_size);
    let (dtype, gated) = (checkpoint.dtype, spec.gate.is_some());
    let strides = || -> Result<(usize, Option<ColumnStrides>), FormatError> {
        let neuron = RecordLayout::new(hidden_size, dtype, gated)?.stride_bytes;
        let channel = ColumnLayout::new(intermediate_size, 1 + usize::from(gated), dtype)?;
        let down = ColumnLayout::new(hidden_size, 1, dtype)?;
        let columns = ColumnStrides {
            channel_bytes: channel.stride_bytes,
            down_bytes: down.stride_bytes,
        };
        let layout = options.layout;
        let neuron = if layout.has_neurons() { neuron } else { 0 };
        Ok((neuron, layout.has_columns().then_some(columns)))
    };
    let strides = strides().map_err(ConvertError::format(Path::new(CONFIG_FILE)));
    let (stride_bytes, column_strides) = strides?;
    Ok(FfnLayer {
        prefix: spec.prefix.clone(),
        file: String::new(),
        layout: options.layout,
        hidden_size,
        intermediate_size,
        stride_bytes,
        column_strides,
        dtype,
        gate: spec.gate.clone(),
        up: spec.up.clone(),
        down: spec.down.clone(),
        gate_bias: spec.gate_bias.clone(),
        up_bias: spec.up_bias.clone(),
        down_bias: spec.down_bias.clone(),
    })
}
