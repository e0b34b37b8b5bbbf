//! The records of one layer: rows and columns of the source's matrices, brought together in blocks of
//! records.
//!
//! ```text
//! for each block of records (64 MiB):
//!     for each matrix with a row in a record, in parallel: the rows
//!     for each matrix with a column: for each 256 rows of it: for each 256 records, in parallel: the tile, turned
//!     checksums, in parallel; write
//! ```
//! A neuron's record has rows of gate and up and a column of down; that of a channel has columns of gate and up, and
//! a down record its column alone. A matrix is read in stripes as wide as the block where its columns are wanted, and let
//! go of after every 256 rows: neither it nor the records are ever in memory whole.

use std::ops::Range;

use rayon::prelude::*;
use wick_format::{crc32c, ColumnKind, Dtype, FfnLayer};

use crate::check::Checkpoint;
use crate::output::OutputFile;
use crate::source::{SourceFolder, SourceTensor};
use crate::ConvertError;

/// Records put together before they are written.
const BLOCK_BYTES: usize = 64 << 20;

/// Rows of a matrix read for their columns before they are let go of.
const TILE_ROWS: usize = 256;

/// Records whose columns are turned by one task.
const TILE_RECORDS: usize = 256;

/// What the records of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// A neuron each: gate row, up row, down column.
    Neurons,
    /// Columns alone.
    Columns(ColumnKind),
}

impl RecordKind {
    /// The kinds that `layer` has, in the order of the file.
    pub(crate) fn of(layer: &FfnLayer) -> Vec<Self> {
        let mut kinds = Vec::new();
        if layer.layout.has_neurons() {
            kinds.push(Self::Neurons);
        }
        if layer.layout.has_columns() {
            kinds.extend(ColumnKind::ALL.map(Self::Columns));
        }
        kinds
    }

    /// The tensor with the records of `layer`.
    pub(crate) fn tensor(self, layer: &FfnLayer) -> String {
        match self {
            Self::Neurons => layer.neurons_tensor(),
            Self::Columns(kind) => layer.columns_tensor(kind),
        }
    }

    /// How many records there are in `layer`, and how far apart.
    pub(crate) fn shape(self, layer: &FfnLayer) -> [usize; 2] {
        match self {
            Self::Neurons => [layer.intermediate_size, layer.stride_bytes],
            Self::Columns(kind) => {
                let layout = layer
                    .column_layout(kind)
                    .expect("asked for such records only");
                [layer.column_count(kind), layout.stride_bytes]
            }
        }
    }
}

/// A matrix of the source on its way into records.
struct Matrix<'a> {
    source: &'a SourceFolder,
    tensor: &'a SourceTensor,
    dtype: Dtype,
}

/// What record `n` has of a matrix.
enum Slice {
    Row,
    Column,
}

/// A matrix, and where its part lies in each record.
struct Part<'a> {
    matrix: Matrix<'a>,
    slice: Slice,
    place: Range<usize>,
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

/// The parts of the records of `kind`.
fn parts<'a>(checkpoint: &'a Checkpoint, layer: &FfnLayer, kind: RecordKind) -> Vec<Part<'a>> {
    let part = |(name, slice, place): (&String, Slice, Range<usize>)| Part {
        matrix: Matrix::new(checkpoint, name),
        slice,
        place,
    };
    let (gate, up, down) = (&layer.gate, &layer.up, &layer.down);
    let columns = |kind| {
        layer
            .column_layout(kind)
            .expect("asked for such records only")
    };
    match kind {
        RecordKind::Neurons => {
            let layout = layer.record_layout();
            let gate = gate.as_ref().zip(layout.gate_range());
            let gate = gate.map(|(name, place)| (name, Slice::Row, place));
            let others = [
                (up, Slice::Row, layout.up_range()),
                (down, Slice::Column, layout.down_range()),
            ];
            gate.into_iter().chain(others).map(part).collect()
        }
        RecordKind::Columns(kind @ ColumnKind::Channel) => {
            let layout = columns(kind);
            let matrices = gate.iter().chain([up]).enumerate();
            matrices
                .map(|(index, name)| part((name, Slice::Column, layout.column_range(index))))
                .collect()
        }
        RecordKind::Columns(kind @ ColumnKind::Down) => {
            let place = columns(kind).columns_range();
            vec![part((down, Slice::Column, place))]
        }
    }
}

/// Streams the records of `layer` of this kind into `out`; returns their checksums.
pub(crate) fn write_records(
    checkpoint: &Checkpoint,
    layer: &FfnLayer,
    kind: RecordKind,
    out: &mut OutputFile,
    on_written: &dyn Fn(u64),
) -> Result<Vec<u32>, ConvertError> {
    let parts = parts(checkpoint, layer, kind);
    let [count, stride_bytes] = kind.shape(layer);
    // Whole tiles, so that no quantised block of a turned matrix is taken apart twice.
    let fitting = BLOCK_BYTES / stride_bytes;
    let block_records = match fitting / TILE_RECORDS {
        0 => fitting.max(1),
        tiles => tiles * TILE_RECORDS,
    };
    let mut checksums = Vec::with_capacity(count);
    let mut records = Vec::new();
    for start in (0..count).step_by(block_records) {
        let range = start..(start + block_records).min(count);
        records.clear();
        records.resize(range.len() * stride_bytes, 0);
        for part in &parts {
            match part.slice {
                Slice::Row => fill_rows(part, stride_bytes, range.clone(), &mut records)?,
                Slice::Column => fill_columns(part, stride_bytes, range.clone(), &mut records)?,
            }
        }
        checksums.par_extend(records.par_chunks(stride_bytes).map(crc32c));
        out.write(&records)?;
        on_written(records.len() as u64);
    }
    Ok(checksums)
}

/// Row `n` of a matrix into record `n`.
fn fill_rows(
    part: &Part<'_>,
    stride_bytes: usize,
    range: Range<usize>,
    records: &mut [u8],
) -> Result<(), ConvertError> {
    let Part { matrix, place, .. } = part;
    let width = place.len() / matrix.dtype.size_bytes();
    records
        .par_chunks_mut(stride_bytes)
        .zip(range.clone())
        .try_for_each(|(record, row)| {
            matrix.read(row..row + 1, 0..width, &mut record[place.clone()])
        })?;
    matrix.release_rows(range);
    Ok(())
}

/// Column `n` of a matrix into record `n`.
fn fill_columns(
    part: &Part<'_>,
    stride_bytes: usize,
    range: Range<usize>,
    records: &mut [u8],
) -> Result<(), ConvertError> {
    let height = part.place.len() / part.matrix.dtype.size_bytes();
    for first_row in (0..height).step_by(TILE_ROWS) {
        let rows = first_row..(first_row + TILE_ROWS).min(height);
        records
            .par_chunks_mut(stride_bytes * TILE_RECORDS)
            .enumerate()
            .try_for_each(|(tile, records)| {
                let start = range.start + tile * TILE_RECORDS;
                let columns = start..(start + TILE_RECORDS).min(range.end);
                fill_tile(part, stride_bytes, rows.clone(), columns, records)
            })?;
        part.matrix.release_rows(rows);
    }
    Ok(())
}

/// Elements `rows` of columns `columns` into the records of those columns.
fn fill_tile(
    part: &Part<'_>,
    stride_bytes: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    records: &mut [u8],
) -> Result<(), ConvertError> {
    let size = part.matrix.dtype.size_bytes();
    let row_bytes = columns.len() * size;
    let mut tile = vec![0; rows.len() * row_bytes];
    part.matrix.read(rows.clone(), columns, &mut tile)?;
    let start = part.place.start + rows.start * size;
    let place = start..start + rows.len() * size;
    for (column, record) in records.chunks_mut(stride_bytes).enumerate() {
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
