//! The records of one layer, by neuron: the only place that knows in which order they lie. Those of columns, where a layer
//! has such records, are always in the order of their numbers.
//!
//! A folder may hold records in an order in which neurons that fire together lie together (`wick reorder`). Everywhere
//! else a neuron has the number that it has in the model, so sums run in the same order and give the same bits.
//!
//! Not here: finding a good order (`candle-wick-convert`), what a record holds (`neurons`, `column_cache`).

use std::ops::Range;

use wick_format::{ColumnKind, FfnLayer, NeuronOrder};
use wick_io::{FlashFile, Reader, SlotBuffer, SlotRead};

use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::stored::{StoredMatrix, StreamRing};

/// Bytes of records that are read at once for somebody who copies them.
const COPY_BYTES: usize = 4 << 20;

/// Where a layer's records are, and what their checksums are.
pub(crate) struct Records {
    /// One row a record, in the order of the file.
    stored: StoredMatrix,
    /// `None` where record `n` is that of neuron `n`.
    order: Option<NeuronOrder>,
}

impl Records {
    /// The records of `stored`, whose neurons `order` tells.
    pub(crate) fn new(stored: StoredMatrix, order: Option<NeuronOrder>) -> Self {
        Self { stored, order }
    }

    pub(crate) fn file(&self) -> &FlashFile {
        &self.stored.file
    }

    /// Bytes of one record.
    pub(crate) fn block_bytes(&self) -> usize {
        self.stored.block_bytes()
    }

    /// The neuron in record `record`.
    pub(crate) fn neuron_of(&self, record: usize) -> usize {
        let order = self.order.as_ref();
        order.map_or(record, |order| order.neuron_of(record))
    }

    fn record_of(&self, neuron: usize) -> usize {
        let order = self.order.as_ref();
        order.map_or(neuron, |order| order.record_of(neuron))
    }

    /// Where the record of `neuron` begins in the file.
    pub(crate) fn offset_bytes(&self, neuron: usize) -> u64 {
        let record = self.record_of(neuron) as u64;
        self.stored.offset_bytes + record * self.stored.row_bytes as u64
    }

    /// The checksum of the record of `neuron`.
    pub(crate) fn checksum(&self, neuron: usize) -> Option<u32> {
        self.stored.checksum(self.record_of(neuron))
    }

    /// Reads all records in the order of the file and calls `consume(records, bytes)` with verified groups;
    /// [`neuron_of`](Self::neuron_of) tells whose they are.
    pub(crate) fn for_each(
        &self,
        reader: &Reader,
        ring: &mut StreamRing,
        consume: impl FnMut(Range<usize>, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let all = 0..self.stored.rows;
        self.stored.for_each_rows(reader, ring, all, consume)
    }
}

impl FlashFolder {
    /// The records of one layer, one row each, and the neurons that they hold; refused where there are none.
    pub(crate) fn records(&self, layer: &FfnLayer) -> Result<Records> {
        if !layer.layout.has_neurons() {
            return Err(Error::Folder {
                path: self.path().to_owned(),
                reason: format!(
                    "{} has no records of whole neurons: convert with --layout neuron or both",
                    layer.prefix
                ),
            });
        }
        let file = self.record_file(layer);
        let (records, checksums) = layer
            .extents(&file.index)
            .map_err(|source| file.format_error(source))?;
        let stored = StoredMatrix {
            name: layer.neurons_tensor(),
            file: file.file.clone(),
            offset_bytes: records.offset_bytes,
            rows: layer.intermediate_size,
            row_bytes: layer.stride_bytes,
            block_rows: 1,
            checksums: Some(file.checksums(checksums)?),
        };
        let order = layer.order_extents(&file.index);
        let order = order.map_err(|source| file.format_error(source))?;
        let order = order.map(|(order, checksum)| {
            let (bytes, checksum) = (file.bytes(order)?, file.checksums(checksum)?);
            let order = NeuronOrder::parse(&layer.order_tensor(), &bytes, checksum[0]);
            order.map_err(|source| file.format_error(source))
        });
        Ok(Records::new(stored.check(&file.path)?, order.transpose()?))
    }

    /// The column records of one layer, one row each; refused where there are none.
    pub(crate) fn columns(&self, layer: &FfnLayer, kind: ColumnKind) -> Result<StoredMatrix> {
        let file = self.record_file(layer);
        let extents = layer.column_extents(kind, &file.index);
        let extents = extents.map_err(|source| file.format_error(source))?;
        let (records, checksums) = extents.ok_or_else(|| Error::Folder {
            path: self.path().to_owned(),
            reason: format!(
                "{} has no records of columns: convert with --layout channel or both",
                layer.prefix
            ),
        })?;
        StoredMatrix {
            name: layer.columns_tensor(kind),
            file: file.file.clone(),
            offset_bytes: records.offset_bytes,
            rows: records.shape[0],
            row_bytes: records.shape[1],
            block_rows: 1,
            checksums: Some(file.checksums(checksums)?),
        }
        .check(&file.path)
    }

    /// Calls `consume` with the record of each of `neurons` in layer `index`, in the order of `neurons`: its whole stride,
    /// verified, and its crc32c. Some 4 MiB are in memory at a time.
    ///
    /// # Errors
    /// There is no such layer or neuron, or a record cannot be read or is damaged.
    pub fn for_each_record(
        &self,
        index: usize,
        neurons: &[u32],
        mut consume: impl FnMut(&[u8], u32),
    ) -> Result<()> {
        let fail = |reason: String| Error::Folder {
            path: self.path().to_owned(),
            reason,
        };
        let layers = &self.manifest().layers;
        let layer = layers.get(index).ok_or_else(|| {
            let count = layers.len();
            fail(format!("has {count} layers, not one of number {index}"))
        })?;
        let ffn = layer.intermediate_size;
        if let Some(neuron) = neurons.iter().find(|neuron| **neuron as usize >= ffn) {
            let prefix = &layer.prefix;
            return Err(fail(format!(
                "{prefix} has {ffn} neurons, not one of number {neuron}"
            )));
        }
        let (records, stride) = (self.records(layer)?, layer.stride_bytes);
        let count = (COPY_BYTES / stride).clamp(1, neurons.len().max(1));
        let mut buffer = SlotBuffer::new(count, stride)?;
        let mut reads = Vec::with_capacity(count);
        for neurons in neurons.chunks(count) {
            reads.clear();
            reads.extend(neurons.iter().enumerate().map(|(slot, neuron)| SlotRead {
                slot,
                offset_bytes: records.offset_bytes(*neuron as usize),
                len_bytes: stride,
                crc32c: records.checksum(*neuron as usize),
            }));
            let ticket = self.reader().submit(buffer, records.file(), &reads);
            let (filled, result) = ticket.wait();
            result?;
            for read in &reads {
                let crc32c = read.crc32c.expect("records have checksums");
                consume(filled.slot(read.slot), crc32c);
            }
            buffer = filled;
        }
        Ok(())
    }
}
