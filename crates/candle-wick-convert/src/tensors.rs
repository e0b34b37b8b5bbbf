//! A safetensors file from its plan: header, then every tensor in the order of the file.

use std::collections::HashMap;

use wick_format::{crc32c, ChecksumBlocks, FfnLayer, StoredDtype};

use crate::check::Checkpoint;
use crate::output::OutputFile;
use crate::plan::{Content, TensorFile};
use crate::records::write_records;
use crate::ConvertError;

/// Bytes written before what they were read from is let go of.
const RELEASE_BYTES: usize = 16 << 20;

/// Writes the whole file; `on_written` is told the length of each piece.
pub(crate) fn write_tensors(
    checkpoint: &Checkpoint,
    layers: &[FfnLayer],
    planned: &TensorFile,
    out: &mut OutputFile,
    on_written: &dyn Fn(u64),
) -> Result<(), ConvertError> {
    let header = planned.layout.header_bytes();
    out.write(header)?;
    on_written(header.len() as u64);
    let mut checksums_of: HashMap<&str, Vec<u32>> = HashMap::new();
    for (name, extent) in planned.layout.entries() {
        match planned.contents.get(name) {
            Some(Content::Records(position, kind)) => {
                let layer = &layers[*position];
                let checksums = write_records(checkpoint, layer, *kind, out, on_written)?;
                checksums_of.insert(name, checksums);
            }
            Some(Content::Plain(position)) => {
                checksums_of.insert(name, write_plain(checkpoint, *position, out, on_written)?);
            }
            Some(Content::ChecksumsOf(other)) => {
                let checksums = checksums_of
                    .remove(other.as_str())
                    .expect("checksums come after their tensor in every plan");
                let bytes: Vec<u8> = checksums.iter().flat_map(|c| c.to_le_bytes()).collect();
                out.write(&bytes)?;
                on_written(extent.len_bytes);
            }
            None => {
                out.write(&vec![0; extent.len_bytes as usize])?; // padding, below 4096 bytes
                on_written(extent.len_bytes);
            }
        }
    }
    Ok(())
}

/// Streams a tensor that is not part of a record; returns the checksums of its blocks.
fn write_plain(
    checkpoint: &Checkpoint,
    position: usize,
    out: &mut OutputFile,
    on_written: &dyn Fn(u64),
) -> Result<Vec<u32>, ConvertError> {
    let (need, dtype) = &checkpoint.resident[position];
    let source = &checkpoint.source;
    let tensor = source
        .get(&need.name)
        .expect("Checkpoint::open found every tensor");
    let blocks = ChecksumBlocks::of(&need.shape, StoredDtype::from(*dtype))
        .map_err(ConvertError::format(&source.path))?;
    let width = tensor.width();
    let row_bytes = width * dtype.size_bytes();
    let mut checksums = Vec::with_capacity(blocks.block_count());
    let mut target = Vec::new();
    let mut released = 0;
    for block in 0..blocks.block_count() {
        let range = blocks.block_bytes_range(block);
        // The tensor is mapped, so its length fits usize. A block has whole rows.
        let row = |byte: u64| (byte as usize).checked_div(row_bytes).unwrap_or(0);
        let rows = row(range.start)..row(range.end);
        target.resize(rows.len() * row_bytes, 0);
        source.read(tensor, rows.clone(), 0..width, *dtype, &mut target)?;
        checksums.push(crc32c(&target));
        out.write(&target)?;
        on_written(target.len() as u64);
        if (rows.end - released) * row_bytes >= RELEASE_BYTES || rows.end == tensor.rows() {
            source.release(tensor, released..rows.end);
            released = rows.end;
        }
    }
    Ok(checksums)
}
