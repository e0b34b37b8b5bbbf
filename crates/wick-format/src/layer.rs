//! One FFN layer in the manifest: where its records are and what they were made of.

use serde::{Deserialize, Serialize};

use crate::column::stride_fault;
use crate::record::SIZE_MAX;
use crate::{
    ChecksumBlocks, ColumnLayout, Dtype, FormatError, PredictorPart, RecordLayout, StoredDtype,
    TensorExtent, TensorIndex,
};

/// How the records of a layer are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// One record a neuron: gate row, up row, down column; in the order of the neurons.
    Neuron,
    /// The same records in another order, which a tensor tells.
    Permuted,
    /// One record an input channel, with its gate and up columns, and one a neuron, with its down column.
    Channel,
    /// The records of `Neuron`, and those of `Channel` beside them.
    Both,
}

impl Layout {
    /// Whether there are records of whole neurons.
    pub const fn has_neurons(self) -> bool {
        !matches!(self, Self::Channel)
    }

    /// Whether there are records of channels and of down columns.
    pub const fn has_columns(self) -> bool {
        matches!(self, Self::Channel | Self::Both)
    }

    /// The name in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Neuron => "neuron",
            Self::Permuted => "permuted",
            Self::Channel => "channel",
            Self::Both => "both",
        }
    }
}

/// Distances between the records of a layer that is stored by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnStrides {
    /// Between the records of two channels.
    pub channel_bytes: usize,
    /// Between the down columns of two neurons.
    pub down_bytes: usize,
}

/// The two kinds of column records of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ColumnKind {
    /// Gate and up, or up alone, by input channel.
    Channel,
    /// Down, by neuron.
    Down,
}

impl ColumnKind {
    /// Both, in the order of the file.
    pub const ALL: [Self; 2] = [Self::Channel, Self::Down];
}

/// The FFN of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FfnLayer {
    /// Prefix of the FFN's tensors in Hugging Face names, such as `model.layers.0.mlp`.
    pub prefix: String,
    /// The file with the records.
    pub file: String,
    /// Arrangement of the records.
    pub layout: Layout,
    /// Elements of a row.
    pub hidden_size: usize,
    /// Neurons.
    pub intermediate_size: usize,
    /// Distance between two neuron records; 0 where there are none.
    pub stride_bytes: usize,
    /// Distances between column records, where there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column_strides: Option<ColumnStrides>,
    /// Element type of the records.
    pub dtype: Dtype,
    /// Name of the gate matrix `[intermediate, hidden]`, in gated FFNs.
    pub gate: Option<String>,
    /// Name of the up matrix `[intermediate, hidden]`.
    pub up: String,
    /// Name of the down matrix `[hidden, intermediate]`.
    pub down: String,
    /// Name of the gate's bias in `resident.safetensors`.
    pub gate_bias: Option<String>,
    /// Name of the up matrix' bias in `resident.safetensors`.
    pub up_bias: Option<String>,
    /// Name of the down matrix' bias in `resident.safetensors`.
    pub down_bias: Option<String>,
}

impl FfnLayer {
    /// Where the parts of a record lie.
    pub fn record_layout(&self) -> RecordLayout {
        RecordLayout {
            hidden_size: self.hidden_size,
            dtype: self.dtype,
            gated: self.gate.is_some(),
            stride_bytes: self.stride_bytes,
        }
    }

    /// Where the columns lie in a record of this kind; `None` for a layer without such records.
    pub fn column_layout(&self, kind: ColumnKind) -> Option<ColumnLayout> {
        let strides = self.column_strides?;
        let (rows, matrix_count, stride_bytes) = match kind {
            ColumnKind::Channel => (
                self.intermediate_size,
                1 + usize::from(self.gate.is_some()),
                strides.channel_bytes,
            ),
            ColumnKind::Down => (self.hidden_size, 1, strides.down_bytes),
        };
        Some(ColumnLayout {
            rows,
            matrix_count,
            dtype: self.dtype,
            stride_bytes,
        })
    }

    /// How many records of this kind a layer with column records has.
    pub fn column_count(&self, kind: ColumnKind) -> usize {
        match kind {
            ColumnKind::Channel => self.hidden_size,
            ColumnKind::Down => self.intermediate_size,
        }
    }

    /// Weight matrices of the FFN: up and down, and gate where it has one.
    pub fn matrices(&self) -> u64 {
        2 + u64::from(self.gate.is_some())
    }

    /// Multiplications of a weight with a value that a token takes when nothing is left out.
    pub fn multiply_adds(&self) -> u64 {
        self.matrices() * self.hidden_size as u64 * self.intermediate_size as u64
    }

    /// Bytes of all records of whole neurons.
    pub fn records_bytes(&self) -> u64 {
        self.intermediate_size as u64 * self.stride_bytes as u64
    }

    /// Name of the tensor with column records: U8 `[count, stride]`.
    pub fn columns_tensor(&self, kind: ColumnKind) -> String {
        match kind {
            ColumnKind::Channel => format!("{}.channels", self.prefix),
            ColumnKind::Down => format!("{}.downs", self.prefix),
        }
    }

    /// Name of the tensor with neuron records: U8 `[intermediate, stride]`.
    pub fn neurons_tensor(&self) -> String {
        format!("{}.neurons", self.prefix)
    }

    /// Name of the tensor with one crc32c a record, over its whole stride: U32 `[intermediate]`.
    pub fn checksums_tensor(&self) -> String {
        format!("{}.neurons.crc32c", self.prefix)
    }

    /// Name of the tensor with the neuron of each record, in a permuted layer: U32 `[intermediate]`.
    pub fn order_tensor(&self) -> String {
        format!("{}.neurons.order", self.prefix)
    }

    /// Name of a tensor of the layer's predictor.
    pub fn predictor_tensor(&self, part: PredictorPart) -> String {
        format!("{}.predictor.{}", self.prefix, part.name())
    }

    /// The extents of neuron records and their checksums in the file's index.
    ///
    /// # Errors
    /// One of them is missing, or has another dtype or shape than this layer says.
    pub fn extents<'a>(
        &self,
        index: &'a TensorIndex,
    ) -> Result<(&'a TensorExtent, &'a TensorExtent), FormatError> {
        let records_shape = [self.intermediate_size, self.stride_bytes];
        let records = index.expect(&self.neurons_tensor(), StoredDtype::U8, &records_shape)?;
        let checksums = index.expect(
            &self.checksums_tensor(),
            StoredDtype::U32,
            &[self.intermediate_size],
        )?;
        Ok((records, checksums))
    }

    /// The extents of column records of this kind and of their checksums in the file's index; `None` for a layer without.
    ///
    /// # Errors
    /// One of them is missing, or has another dtype or shape than this layer says.
    pub fn column_extents<'a>(
        &self,
        kind: ColumnKind,
        index: &'a TensorIndex,
    ) -> Result<Option<(&'a TensorExtent, &'a TensorExtent)>, FormatError> {
        let Some(layout) = self.column_layout(kind) else {
            return Ok(None);
        };
        let (name, count) = (self.columns_tensor(kind), self.column_count(kind));
        let records = index.expect(&name, StoredDtype::U8, &[count, layout.stride_bytes])?;
        let checksums = ChecksumBlocks::tensor_name(&name);
        let checksums = index.expect(&checksums, StoredDtype::U32, &[count])?;
        Ok(Some((records, checksums)))
    }

    /// The extents of a permuted layer's order and of its checksum in the file's index; `None` for a layer whose
    /// records are in the order of the neurons.
    ///
    /// # Errors
    /// A permuted layer lacks one of them, or has it in another dtype or shape; or there is an order, and the layer is
    /// not permuted.
    pub fn order_extents<'a>(
        &self,
        index: &'a TensorIndex,
    ) -> Result<Option<(&'a TensorExtent, &'a TensorExtent)>, FormatError> {
        let name = self.order_tensor();
        if self.layout != Layout::Permuted {
            if index.tensors.contains_key(&name) {
                return Err(FormatError::Tensor {
                    tensor: name,
                    got: "there".into(),
                    expected: format!("none in a layer of layout {}", self.layout.name()),
                });
            }
            return Ok(None);
        }
        let order = index.expect(&name, StoredDtype::U32, &[self.intermediate_size])?;
        let checksum = ChecksumBlocks::tensor_name(&name);
        let checksum = index.expect(&checksum, StoredDtype::U32, &[1])?;
        Ok(Some((order, checksum)))
    }

    /// Checks sizes, stride, dtype and names of layer `position`.
    pub(crate) fn check(&self, position: usize, dtype: Dtype) -> Result<(), FormatError> {
        let fail = |field: &str, got: String, expected: String| FormatError::Manifest {
            field: format!("layers[{position}].{field}"),
            got,
            expected,
        };
        for (field, size) in [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
        ] {
            if size == 0 || size > SIZE_MAX {
                return Err(fail(field, size.to_string(), format!("1 to {SIZE_MAX}")));
            }
        }
        self.check_strides().map_err(|fault| {
            let (field, got, expected) = fault;
            fail(field, got, expected)
        })?;
        if self.dtype != dtype {
            return Err(fail(
                "dtype",
                self.dtype.to_string(),
                format!("the model's, {dtype}"),
            ));
        }
        if self.gate.is_none() && self.gate_bias.is_some() {
            return Err(fail(
                "gate_bias",
                "set".into(),
                "null in a layer without gate".into(),
            ));
        }
        let names = [&self.up, &self.down, &self.prefix].into_iter();
        let options = [&self.gate, &self.gate_bias, &self.up_bias, &self.down_bias];
        if names
            .chain(options.into_iter().flatten())
            .any(String::is_empty)
        {
            return Err(fail(
                "a name",
                "empty".into(),
                "the name of a tensor".into(),
            ));
        }
        Ok(())
    }
    /// The field, what it is and what it must be, of a stride that breaks a rule. Sizes are in bounds.
    fn check_strides(&self) -> Result<(), (&'static str, String, String)> {
        let stride = self.stride_bytes;
        let fault = match self.layout.has_neurons() {
            true => stride_fault(stride, self.record_layout().record_bytes()),
            false => (stride != 0).then(|| "0 in a layer without neuron records".to_owned()),
        };
        if let Some(expected) = fault {
            return Err(("stride_bytes", stride.to_string(), expected));
        }
        let name = self.layout.name();
        match (self.layout.has_columns(), self.column_strides) {
            (true, None) => {
                let expected = format!("an object in a layer of layout {name}");
                return Err(("column_strides", "missing".into(), expected));
            }
            (false, Some(_)) => {
                let expected = format!("none in a layer of layout {name}");
                return Err(("column_strides", "set".into(), expected));
            }
            _ => {}
        }
        for (kind, field) in [
            (ColumnKind::Channel, "column_strides.channel_bytes"),
            (ColumnKind::Down, "column_strides.down_bytes"),
        ] {
            let layout = self.column_layout(kind);
            let fault = layout.and_then(|layout| Some((layout, layout.stride_fault()?)));
            if let Some((layout, expected)) = fault {
                return Err((field, layout.stride_bytes.to_string(), expected));
            }
        }
        Ok(())
    }
}
