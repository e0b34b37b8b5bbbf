//! A file of predictors: the tensors of all layers, written as a whole, in the place of one that was there.
//!
//! One tensor is in memory at a time; where they come from is the caller's.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use candle_wick::PredictorMetadata;
use wick_format::{
    crc32c, ChecksumBlocks, FileLayout, Manifest, PredictorPart, StoredDtype, TensorSpec,
};

use crate::output::OutputFolder;
use crate::ConvertError;

/// Bytes copied at a time.
const COPY_BYTES: usize = 1 << 20;

/// The tensors of low-rank predictors of 16-bit numbers, in the order of the file: those of layer `n` have rank `ranks[n]`.
pub(crate) fn pair_specs(manifest: &Manifest, ranks: &[usize]) -> Vec<TensorSpec> {
    let layers = manifest.layers.iter().zip(ranks);
    let specs = layers.flat_map(|(layer, rank)| {
        PredictorPart::PAIR.map(|part| part.spec(layer, StoredDtype::F16, *rank))
    });
    specs.collect()
}

/// Writes the tensors `specs`, with their checksums behind them, to `path`; gives the file's size.
///
/// `content(index)` gives the bytes of `specs[index]`, and is called once for each, in order.
pub(crate) fn write(
    path: &Path,
    metadata: &PredictorMetadata,
    specs: &[TensorSpec],
    content: &dyn Fn(usize) -> Result<Vec<u8>, ConvertError>,
) -> Result<u64, ConvertError> {
    let layout = lay_out(path, metadata, specs)?;
    let mut sources = BTreeMap::new();
    for (index, spec) in specs.iter().enumerate() {
        let blocks =
            ChecksumBlocks::of(&spec.shape, spec.dtype).map_err(ConvertError::format(path))?;
        sources.insert(spec.name.as_str(), (index, blocks));
    }
    let (folder, name) = place(path)?;
    let output = OutputFolder::open(folder)?;
    output.check_room(layout.total_bytes())?;
    let entry = output.write_file(name, layout.total_bytes(), |file| {
        file.write(layout.header_bytes())?;
        let mut checksums_of = BTreeMap::new();
        for (name, extent) in layout.entries() {
            if let Some((index, blocks)) = sources.get(name.as_str()) {
                let bytes = content(*index)?;
                checksums_of.insert(ChecksumBlocks::tensor_name(name), checksums(blocks, &bytes));
                file.write(&bytes)?;
            } else if let Some(checksums) = checksums_of.remove(name) {
                file.write(&checksums)?;
            } else {
                file.write(&vec![0; extent.len_bytes as usize])?; // padding, below 4096 bytes
            }
        }
        Ok(())
    })?;
    Ok(entry.size_bytes)
}

/// Writes the file at `source` again as `path`, the same tensors `specs` under other metadata; gives its size.
pub(crate) fn write_again(
    source: &Path,
    path: &Path,
    metadata: &PredictorMetadata,
    specs: &[TensorSpec],
) -> Result<u64, ConvertError> {
    let layout = lay_out(path, metadata, specs)?;
    let read = ConvertError::io(source, "read");
    let open = || -> io::Result<(File, u64, u64)> {
        let mut file = File::open(source)?;
        let mut header_bytes = [0; 8];
        file.read_exact(&mut header_bytes)?;
        let data_start = u64::from_le_bytes(header_bytes).saturating_add(8);
        let len_bytes = file.metadata()?.len();
        file.seek(SeekFrom::Start(data_start))?;
        Ok((file, data_start, len_bytes))
    };
    let (mut file, data_start, len_bytes) = open().map_err(read)?;
    let data_bytes = layout.total_bytes() - layout.header_bytes().len() as u64;
    if len_bytes.checked_sub(data_start) != Some(data_bytes) {
        let problem = format!("has not the {data_bytes} bytes of tensors that were written");
        return Err(ConvertError::checkpoint(source, problem));
    }
    let (folder, name) = place(path)?;
    let output = OutputFolder::open(folder)?;
    output.check_room(layout.total_bytes())?;
    let entry = output.write_file(name, layout.total_bytes(), |out| {
        out.write(layout.header_bytes())?;
        let mut buffer = vec![0; COPY_BYTES.min(data_bytes as usize)];
        let mut left = data_bytes as usize;
        while left > 0 {
            let piece = &mut buffer[..COPY_BYTES.min(left)];
            let filled = file.read_exact(piece);
            filled.map_err(ConvertError::io(source, "read"))?;
            out.write(piece)?;
            left -= piece.len();
        }
        Ok(())
    })?;
    Ok(entry.size_bytes)
}

/// Where the tensors `specs` and their checksums lie in a file at `path`.
fn lay_out(
    path: &Path,
    metadata: &PredictorMetadata,
    specs: &[TensorSpec],
) -> Result<FileLayout, ConvertError> {
    let mut all_specs = specs.to_vec();
    for spec in specs {
        let blocks =
            ChecksumBlocks::of(&spec.shape, spec.dtype).map_err(ConvertError::format(path))?;
        let name = ChecksumBlocks::tensor_name(&spec.name);
        let shape = [blocks.block_count()];
        all_specs.push(TensorSpec::new(name, StoredDtype::U32, &shape));
    }
    FileLayout::new(&all_specs, &metadata.to_map()).map_err(ConvertError::format(path))
}

/// The folder that `path` is in, and its name there.
pub(super) fn place(path: &Path) -> Result<(&Path, &str), ConvertError> {
    let name = path.file_name().and_then(OsStr::to_str);
    let name = name.ok_or_else(|| ConvertError::output(path, "is no name for a file"))?;
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    Ok((folder.unwrap_or(Path::new(".")), name))
}

/// The checksums of a tensor, as their tensor holds them.
fn checksums(blocks: &ChecksumBlocks, bytes: &[u8]) -> Vec<u8> {
    let checksum = |block| {
        let range = blocks.block_bytes_range(block);
        crc32c(&bytes[range.start as usize..range.end as usize]).to_le_bytes()
    };
    (0..blocks.block_count()).flat_map(checksum).collect()
}
