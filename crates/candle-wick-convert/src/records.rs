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
use wick_format::{crc32c, Dtype, FfnLayer, RecordLayout};

use crate::check::Checkpoint;
use crate::output::OutputFile;
use crate::source::{SourceFolder, SourceTensor};
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
    dtype: Dtype,
}

impl<'a> Matrix<'a> {
    fn new(checkpoint: &'a Checkpoint, name: &str) -> Self {
        let source = &checkpoint.source;
        Self {
            source,
            tensor: source
                .get(name)
                .expect("Checkpoint::open found every matrix"),
            dtype: checkpoint.dtype,
        }
    }

    fn read(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        target: &mut [u8],
    ) -> Result<(), ConvertError> {
        self.source
            .read(self.tensor, rows, columns, self.dtype, target)
    }

    fn release_rows(&self, rows: Range<usize>) {
        self.source.release(self.tensor, rows);
    }
}

/// Streams the records of `layer` into `out`; returns their checksums.
pub(crate) fn write_records(
    checkpoint: &Checkpoint,
    layer: &FfnLayer,
    out: &mut OutputFile,
    on_written: &dyn Fn(u64),
) -> Result<Vec<u32>, ConvertError> {
    let layout = layer.record_layout();
    let rows = [
        layer.gate.as_ref().zip(layout.gate_range()),
        Some((&layer.up, layout.up_range())),
    ];
    let mut row_matrices = Vec::with_capacity(2);
    for (name, place) in rows.into_iter().flatten() {
        row_matrices.push((Matrix::new(checkpoint, name), place));
    }
    let down = Matrix::new(checkpoint, &layer.down);

    // Whole tiles, so that no quantised block of the down matrix is taken apart twice.
    let fitting = BLOCK_BYTES / layout.stride_bytes;
    let block_neurons = match fitting / TILE_NEURONS {
        0 => fitting.max(1),
        tiles => tiles * TILE_NEURONS,
    };
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
            let row = neuron..neuron + 1;
            matrix.read(row, 0..layout.hidden_size, &mut record[place.clone()])
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
    down.read(rows.clone(), columns, &mut tile)?;
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
