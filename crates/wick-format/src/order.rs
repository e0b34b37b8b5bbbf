//! The order of a permuted layer's records: which neuron each of them holds, and where each neuron is.
//!
//! Invariant: the two lists are inverse permutations of `0..neuron_count`.
//!
//! Not here: which order is a good one; everything outside of the records goes by a neuron's own number.

use crate::{crc32c, u32_values, FormatError};

/// What an entry is before it is known; no layer has that many neurons.
const NONE: u32 = u32::MAX;

/// A permutation of a layer's neurons, read in both directions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeuronOrder {
    neuron_of: Vec<u32>,
    record_of: Vec<u32>,
}

impl NeuronOrder {
    /// Bytes that the order of a layer of `neuron_count` neurons takes.
    pub fn len_bytes(neuron_count: usize) -> u64 {
        8 * neuron_count as u64
    }

    /// The order in which record `r` holds neuron `neuron_of[r]`; `tensor` names it in errors.
    ///
    /// # Errors
    /// A number is not one of the layer's neurons, or is there twice.
    pub fn new(tensor: &str, neuron_of: Vec<u32>) -> Result<Self, FormatError> {
        let count = neuron_of.len();
        let fail = |got: String| FormatError::Tensor {
            tensor: tensor.into(),
            got,
            expected: format!("each of {count} neurons once"),
        };
        let mut record_of = vec![NONE; count];
        for (record, &neuron) in neuron_of.iter().enumerate() {
            match record_of.get_mut(neuron as usize) {
                Some(place) if *place == NONE => *place = record as u32,
                Some(place) => {
                    return Err(fail(format!(
                        "neuron {neuron} in records {place} and {record}"
                    )));
                }
                None => return Err(fail(format!("neuron {neuron} in record {record}"))),
            }
        }
        Ok(Self {
            neuron_of,
            record_of,
        })
    }

    /// The order as its tensor holds it: little-endian U32, whose crc32c is `expected`.
    ///
    /// # Errors
    /// The checksum is another one, or the numbers are no permutation.
    pub fn parse(tensor: &str, bytes: &[u8], expected: u32) -> Result<Self, FormatError> {
        let got = crc32c(bytes);
        if got != expected {
            return Err(FormatError::Tensor {
                tensor: tensor.into(),
                got: format!("crc32c {got:08x}"),
                expected: format!("{expected:08x}"),
            });
        }
        Self::new(tensor, u32_values(bytes))
    }

    /// The bytes that [`parse`](Self::parse) reads.
    pub fn to_bytes(&self) -> Vec<u8> {
        let words = self.neuron_of.iter();
        words.flat_map(|neuron| neuron.to_le_bytes()).collect()
    }

    /// The neurons in the order of their records.
    pub fn neurons(&self) -> &[u32] {
        &self.neuron_of
    }

    /// The record that holds `neuron`.
    ///
    /// # Panics
    /// The layer has no such neuron.
    pub fn record_of(&self, neuron: usize) -> usize {
        self.record_of[neuron] as usize
    }

    /// The neuron in `record`.
    ///
    /// # Panics
    /// The layer has no such record.
    pub fn neuron_of(&self, record: usize) -> usize {
        self.neuron_of[record] as usize
    }
}
