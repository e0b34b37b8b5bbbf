//! The neurons of one layer: where their records lie, and what is computed from a record.
//!
//! A record is a gate row (gated layers), an up row and a down column, each `hidden` long. A neuron's
//! coefficient is `act(gate) * up` or `act(up)`; the layer's output is the sum of coefficient times down
//! column. Biases are small and stay in DRAM.
//!
//! Not here: which neurons (`selector`), which slots (`neuron_cache`).

use std::ops::Range;

use wick_format::{Dtype, FfnLayer, RecordLayout};
use wick_io::{SlotBuffer, SlotRead, Ticket};
use wick_kernels::{dot_rows, WeightDtype};

use crate::activation::Activation;
use crate::error::Result;
use crate::folder::FlashFolder;
use crate::matrix::Matrix;
use crate::records::Records;
use crate::workspace::sized;

/// One layer's records and biases.
pub(crate) struct LayerNeurons {
    pub(crate) folder: FlashFolder,
    pub(crate) layer: FfnLayer,
    pub(crate) records: Records,
    pub(crate) layout: RecordLayout,
    pub(crate) dtype: WeightDtype,
    pub(crate) activation: Activation,
    /// Whether a neuron is read as one record, and not as rows and column apart.
    bundled: bool,
    gate_bias: Option<Vec<f32>>,
    up_bias: Option<Vec<f32>>,
    pub(crate) down_bias: Option<Vec<f32>>,
}

impl LayerNeurons {
    pub(crate) fn load(
        folder: &FlashFolder,
        layer: FfnLayer,
        activation: Activation,
        bundled: bool,
    ) -> Result<Self> {
        Ok(Self {
            folder: folder.clone(),
            records: folder.records(&layer)?,
            layout: layer.record_layout(),
            dtype: kernel_dtype(layer.dtype),
            activation,
            bundled,
            gate_bias: optional_values(folder, &layer.gate_bias, layer.intermediate_size)?,
            up_bias: optional_values(folder, &layer.up_bias, layer.intermediate_size)?,
            down_bias: optional_values(folder, &layer.down_bias, layer.hidden_size)?,
            layer,
        })
    }

    /// Empty slots for so many neurons: one each, or one for the rows and one for the column.
    pub(crate) fn new_slots(&self, slot_count: usize) -> Result<SlotBuffer> {
        let slots = match self.bundled {
            true => SlotBuffer::new(slot_count, self.layer.stride_bytes),
            false => SlotBuffer::new(2 * slot_count, self.layout.down_range().start),
        };
        Ok(slots?)
    }

    /// Adds what has to be read so that `neuron` is in `slot`: its record, or its two parts.
    pub(crate) fn push_reads(&self, neuron: u32, slot: usize, reads: &mut Vec<SlotRead>) {
        let neuron = neuron as usize;
        let record = self.records.offset_bytes(neuron);
        if self.bundled {
            reads.push(SlotRead {
                slot,
                offset_bytes: record,
                len_bytes: self.layer.stride_bytes,
                crc32c: self.records.checksum(neuron),
            });
            return;
        }
        let down = self.layout.down_range();
        for (slot, part) in [(2 * slot, 0..down.start), (2 * slot + 1, down)] {
            reads.push(SlotRead {
                slot,
                offset_bytes: record + part.start as u64,
                len_bytes: part.len(),
                crc32c: None,
            });
        }
    }

    /// Gate and up rows of the neuron in `slot`, as they lie in a record.
    pub(crate) fn rows<'a>(&self, reads: &'a Ticket, slot: usize) -> &'a [u8] {
        match self.bundled {
            true => reads.slot(slot),
            false => reads.slot(2 * slot),
        }
    }

    /// The down column of the neuron in `slot`.
    pub(crate) fn down_column<'a>(&self, reads: &'a Ticket, slot: usize) -> &'a [u8] {
        let down = self.layout.down_range();
        match self.bundled {
            true => &reads.slot(slot)[down],
            false => &reads.slot(2 * slot + 1)[..down.len()],
        }
    }

    /// Reads all records in the order of the file, and calls `visit(records, bytes)` with groups of them.
    pub(crate) fn for_each_range(
        &self,
        visit: impl FnMut(Range<usize>, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut ring = self.folder.ring();
        self.records
            .for_each(self.folder.reader(), &mut ring, visit)
    }

    /// Starts reading `reads` into `buffer`.
    pub(crate) fn submit(&self, buffer: SlotBuffer, reads: &[SlotRead]) -> Ticket {
        self.folder
            .reader()
            .submit(buffer, self.records.file(), reads)
    }

    /// Starts reading `reads` behind what is in flight for `ticket`.
    pub(crate) fn submit_behind(&self, ticket: &mut Ticket, reads: &[SlotRead]) {
        self.folder
            .reader()
            .submit_behind(ticket, self.records.file(), reads);
    }

    /// The pre-activations that decide whether neurons are active (the gate's in a gated layer), bias
    /// included: `out[r * tokens + t]` for the neurons `neuron(r)` with records `record(r)`.
    pub(crate) fn deciding<'a>(
        &self,
        count: usize,
        neuron: impl Fn(usize) -> u32,
        record: impl Fn(usize) -> &'a [u8] + Sync,
        x: Rows<'_>,
        out: &mut Vec<f32>,
    ) {
        let (range, bias) = match self.layout.gate_range() {
            Some(gate) => (gate, &self.gate_bias),
            None => (self.layout.up_range(), &self.up_bias),
        };
        let out = sized(out, count * x.tokens);
        let row = |r: usize| &record(r)[range.clone()];
        dot_rows(self.dtype, count, row, x.values, x.tokens, out);
        add_bias(out, x.tokens, bias, neuron);
    }

    /// The `up` factors of a gated layer, bias included, laid out as [`Self::deciding`].
    pub(crate) fn up_factors<'a>(
        &self,
        count: usize,
        neuron: impl Fn(usize) -> u32,
        record: impl Fn(usize) -> &'a [u8] + Sync,
        x: Rows<'_>,
        out: &mut Vec<f32>,
    ) {
        let range = self.layout.up_range();
        let out = sized(out, count * x.tokens);
        let row = |r: usize| &record(r)[range.clone()];
        dot_rows(self.dtype, count, row, x.values, x.tokens, out);
        add_bias(out, x.tokens, &self.up_bias, neuron);
    }
}

/// A vector of `len` values as f32, where there is one.
pub(crate) fn optional_values(
    folder: &FlashFolder,
    name: &Option<String>,
    len: usize,
) -> Result<Option<Vec<f32>>> {
    let load = |name: &String| Matrix::load(folder, name, &[len], false)?.to_f32();
    name.as_ref().map(load).transpose()
}

/// The inputs of a step, `(tokens, hidden)` in row-major order.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) tokens: usize,
    pub(crate) values: &'a [f32],
}

fn add_bias(
    out: &mut [f32],
    tokens: usize,
    bias: &Option<Vec<f32>>,
    neuron: impl Fn(usize) -> u32,
) {
    let Some(bias) = bias else {
        return;
    };
    for (r, values) in out.chunks_mut(tokens.max(1)).enumerate() {
        let bias = bias[neuron(r) as usize];
        values.iter_mut().for_each(|value| *value += bias);
    }
}

/// The kernels' name of a record's dtype.
pub(crate) fn kernel_dtype(dtype: Dtype) -> WeightDtype {
    match dtype {
        Dtype::F32 => WeightDtype::F32,
        Dtype::F16 => WeightDtype::F16,
        Dtype::Bf16 => WeightDtype::Bf16,
    }
}
