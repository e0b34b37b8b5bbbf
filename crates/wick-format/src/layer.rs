//! One FFN layer in the manifest: where its records are and what they were made of.

use serde::{Deserialize, Serialize};

use crate::record::{SIZE_MAX, STRIDE_UNIT_BYTES};
use crate::{
    ChecksumBlocks, Dtype, FormatError, RecordLayout, StoredDtype, TensorExtent, TensorIndex,
};

/// How the records of a layer are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// One record a neuron: gate row, up row, down column; in the order of the neurons.
    Neuron,
    /// The same records in another order, which a tensor tells.
    Permuted,
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
    /// Neurons, and so records.
    pub intermediate_size: usize,
    /// Distance between two records.
    pub stride_bytes: usize,
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

    /// Bytes of all records.
    pub fn records_bytes(&self) -> u64 {
        self.intermediate_size as u64 * self.stride_bytes as u64
    }

    /// Name of the tensor with the records: U8 `[intermediate, stride]`.
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

    /// Name of a tensor of the layer's predictor: `down.weight`, `up.weight` or `up.bias`.
    pub fn predictor_tensor(&self, part: &str) -> String {
        format!("{}.predictor.{part}", self.prefix)
    }

    /// The extents of records and checksums in the file's index.
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
                    expected: "none in a layer of layout neuron".into(),
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
        let record_bytes = self.record_layout().record_bytes(); // bounded by SIZE_MAX
        let stride = self.stride_bytes;
        let strides = record_bytes..record_bytes + 4096;
        if !stride.is_multiple_of(STRIDE_UNIT_BYTES) || !strides.contains(&stride) {
            let expected = format!(
                "a multiple of {STRIDE_UNIT_BYTES} from {} to {}",
                strides.start,
                strides.end - 1
            );
            return Err(fail("stride_bytes", stride.to_string(), expected));
        }
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
}
