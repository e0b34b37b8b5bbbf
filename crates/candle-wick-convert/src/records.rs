//! The records of one layer: rows of gate and up, columns of down, brought together in blocks of
//! neurons.
//!
//! ```text
//! for each block of neurons (64 MiB of records):
//!     for each neuron of the block, in parallel: gate row, up row
//!     for each 256 rows of down: for each 256 neurons, in parallel: the tile, turned
//!     checksums, in parallel; write
//! ```
//! The down matrix `[hidden, ffn]` is read in stripes as wide as the block, and let go of after
//! every 256 rows: neither it nor the records are ever in memory whole.

use std::ops::Range;

use rayon::prelude::*;
use wick_format::{crc32c, FfnLayer, RecordLayout};

use crate::check::Checkpoint;
use crate::output::OutputFile;
use crate::source::{SourceFolder, SourceTensor};
use crate::transcode::Cast;
use crate::ConvertError;

/// Records put together before they are written.
const BLOCK_BYTES: usize = 64 << 20;

/// Rows of down read before they are let go of.
const TILE_ROWS: usize = 256;

/// Neurons whose columns are turned by one task.
const TILE_NEURONS: usize = 256;

/// A matrix of the source on its way into records.
struct Matrix<'a> {
    source: &'a SourceFolder,
    tensor: &'a SourceTensor,
    bytes: &'a [u8],
    cast: Cast,
    /// Elements of a row.
    width: usize,
}

impl<'a> Matrix<'a> {
    fn new(checkpoint: &'a Checkpoint, name: &str, width: usize) -> Result<Self, ConvertError> {
        let source = &checkpoint.source;
        let tensor = source
            .get(name)
            .expect("Checkpoint::open found every matrix");
        let cast = Cast {
            from: source.dtype(tensor)?,
            to: checkpoint.dtype,
        };
        Ok(Self {
            source,
            tensor,
            bytes: source.bytes(tensor),
            cast,
            width,
        })
    }

    /// Bytes of elements `columns` of row `row`, relative to the tensor.
    fn range(&self, row: usize, columns: Range<usize>) -> Range<usize> {
        let at = |column: usize| (row * self.width + column) * self.cast.from.size_bytes();
        at(columns.start)..at(columns.end)
    }

    fn copy(
        &self,
        row: usize,
        columns: Range<usize>,
        target: &mut [u8],
    ) -> Result<(), ConvertError> {
        let range = self.range(row, columns);
        self.cast
            .apply(&self.bytes[range], target)
            .map_err(|value| out_of_range(self.source, self.tensor, self.cast, value))
    }

    fn release_rows(&self, rows: Range<usize>) {
        let at = |row: usize| self.range(row, 0..0).start;
        self.source
            .release(self.tensor, at(rows.start)..at(rows.end));
    }
}

/// The error for a value that the wanted dtype cannot hold.
pub(crate) fn out_of_range(
    source: &SourceFolder,
    tensor: &SourceTensor,
    cast: Cast,
    value: f32,
) -> ConvertError {
    let got = format!("too large for {} with a value of {value}", cast.to);
    let limit = cast.limit();
    source.wrong(
        tensor,
        got,
        format!("at most {limit} in magnitude (f32 or bf16 would hold it)"),
    )
}

/// Streams the records of `layer` into `out`; returns their checksums.
pub(crate) fn write_records(
    checkpoint: &Checkpoint,
    layer: &FfnLayer,
    out: &mut OutputFile,
    on_written: &dyn Fn(u64),
) -> Result<Vec<u32>, ConvertError> {
    let layout = layer.record_layout();
    let hidden = layer.hidden_size;
    let rows = [
        layer.gate.as_ref().zip(layout.gate_range()),
        Some((&layer.up, layout.up_range())),
    ];
    let mut row_matrices = Vec::with_capacity(2);
    for (name, place) in rows.into_iter().flatten() {
        row_matrices.push((Matrix::new(checkpoint, name, hidden)?, place));
    }
    let down = Matrix::new(checkpoint, &layer.down, layer.intermediate_size)?;

    let block_neurons = (BLOCK_BYTES / layout.stride_bytes).max(1);
    let mut checksums = Vec::with_capacity(layer.intermediate_size);
    let mut records = Vec::new();
    for start in (0..layer.intermediate_size).step_by(block_neurons) {
        let neurons = start..(start + block_neurons).min(layer.intermediate_size);
        records.clear();
        records.resize(neurons.len() * layout.stride_bytes, 0);
        for (matrix, place) in &row_matrices {
            fill_rows(matrix, place, &layout, neurons.clone(), &mut records)?;
        }
        fill_columns(&down, &layout, neurons, &mut records)?;
        checksums.par_extend(records.par_chunks(layout.stride_bytes).map(crc32c));
        out.write(&records)?;
        on_written(records.len() as u64);
    }
    Ok(checksums)
}

/// Row `n` of a matrix into record `n`, at `place`.
fn fill_rows(
    matrix: &Matrix<'_>,
    place: &Range<usize>,
    layout: &RecordLayout,
    neurons: Range<usize>,
    records: &mut [u8],
) -> Result<(), ConvertError> {
    records
        .par_chunks_mut(layout.stride_bytes)
        .zip(neurons.clone())
        .try_for_each(|(record, neuron)| {
            matrix.copy(neuron, 0..layout.hidden_size, &mut record[place.clone()])
        })?;
    matrix.release_rows(neurons);
    Ok(())
}

/// Column `n` of the down matrix into record `n`.
fn fill_columns(
    down: &Matrix<'_>,
    layout: &RecordLayout,
    neurons: Range<usize>,
    records: &mut [u8],
) -> Result<(), ConvertError> {
    for first_row in (0..layout.hidden_size).step_by(TILE_ROWS) {
        let rows = first_row..(first_row + TILE_ROWS).min(layout.hidden_size);
        records
            .par_chunks_mut(layout.stride_bytes * TILE_NEURONS)
            .enumerate()
            .try_for_each(|(tile, records)| {
                let start = neurons.start + tile * TILE_NEURONS;
                let columns = start..(start + TILE_NEURONS).min(neurons.end);
                fill_tile(down, layout, rows.clone(), columns, records)
            })?;
        down.release_rows(rows);
    }
    Ok(())
}

/// Elements `rows` of columns `columns` into the records of those columns.
fn fill_tile(
    down: &Matrix<'_>,
    layout: &RecordLayout,
    rows: Range<usize>,
    columns: Range<usize>,
    records: &mut [u8],
) -> Result<(), ConvertError> {
    let size = layout.dtype.size_bytes();
    let row_bytes = columns.len() * size;
    let mut tile = vec![0; rows.len() * row_bytes];
    for (row, target) in rows.clone().zip(tile.chunks_mut(row_bytes)) {
        down.copy(row, columns.clone(), target)?;
    }
    let place = layout.down_range().start + rows.start * size;
    let place = place..place + rows.len() * size;
    for (column, record) in records.chunks_mut(layout.stride_bytes).enumerate() {
        let target = &mut record[place.clone()];
        match size {
            2 => gather::<2>(&tile[column * size..], row_bytes, target),
            4 => gather::<4>(&tile[column * size..], row_bytes, target),
            other => unreachable!("no dtype has elements of {other} bytes"),
        }
    }
    Ok(())
}

/// Every `step`-th byte's element of `column` into `target`.
fn gather<const SIZE: usize>(column: &[u8], step: usize, target: &mut [u8]) {
    for (element, row) in target
        .as_chunks_mut::<SIZE>()
        .0
        .iter_mut()
        .zip(column.chunks(step))
    {
        element.copy_from_slice(&row[..SIZE]);
    }
}
