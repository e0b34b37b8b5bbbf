//! What the elements of a stored tensor are, and how they become f32, f16 or bf16.
//!
//! Blocks of quantised types are turned into floats by candle, some thousand elements at a time: the memory that
//! takes does not grow with the tensor.

use std::ops::Range;

use candle::quantized::GgmlDType;
use candle::CpuStorage;
use wick_format::Dtype;

use super::random::Random;
use crate::transcode::{narrow, Cast};

/// Elements made into floats at a time.
const PIECE: usize = 1 << 14;

/// An element type.
#[derive(Clone, Debug)]
pub(super) enum Elements {
    /// Floats.
    Floats(Dtype),
    /// Floats of 64 bits, which are read as f32.
    F64,
    /// Quantised blocks.
    Blocks(GgmlDType),
    /// Floats that are made up as they are read, and lie in no file.
    Random(Random),
    /// Nothing that weights are made of, in words.
    Other(String),
}

impl Elements {
    /// The type of this name in safetensors, PyTorch or GGUF files; the first one lies at `offset` in its file.
    pub(super) fn of(name: &str, offset: usize) -> Self {
        if let Ok(dtype) = Dtype::try_from(name) {
            return Self::Floats(dtype);
        }
        let blocks = match name {
            "F64" => return Self::F64,
            "Q4_0" => GgmlDType::Q4_0,
            "Q4_1" => GgmlDType::Q4_1,
            "Q5_0" => GgmlDType::Q5_0,
            "Q5_1" => GgmlDType::Q5_1,
            "Q8_0" => GgmlDType::Q8_0,
            "Q2_K" => GgmlDType::Q2K,
            "Q3_K" => GgmlDType::Q3K,
            "Q4_K" => GgmlDType::Q4K,
            "Q5_K" => GgmlDType::Q5K,
            "Q6_K" => GgmlDType::Q6K,
            other => return Self::Other(other.to_string()),
        };
        // candle takes blocks only where their 16-bit scales are aligned; files are mapped at a page's start.
        if offset.is_multiple_of(2) {
            Self::Blocks(blocks)
        } else {
            Self::Other(format!("{name} at the odd offset {offset}"))
        }
    }

    /// The dtype in which they are written unless another one is wanted; for no weights, what they are instead.
    ///
    /// A block's scale is an f16, so f16 loses less than the quantisation did.
    pub(super) fn dtype(&self) -> Result<Dtype, &str> {
        match self {
            Self::Floats(dtype) => Ok(*dtype),
            Self::F64 | Self::Random(_) => Ok(Dtype::F32),
            Self::Blocks(_) => Ok(Dtype::F16),
            Self::Other(what) => Err(what),
        }
    }

    /// Elements and bytes of the smallest piece that can be read.
    fn unit(&self) -> (usize, usize) {
        match self {
            Self::Floats(dtype) => (1, dtype.size_bytes()),
            Self::F64 => (1, 8),
            Self::Blocks(blocks) => (blocks.block_size(), blocks.type_size()),
            Self::Random(_) => (1, 0),
            Self::Other(_) => (1, 1),
        }
    }

    /// The bytes that hold these elements.
    pub(super) fn byte_range(&self, span: Range<usize>) -> Range<usize> {
        let (elements, bytes) = self.unit();
        span.start / elements * bytes..span.end.div_ceil(elements) * bytes
    }

    /// Copies the elements at these places, which are no quantised blocks, side by side.
    pub(super) fn gather(
        &self,
        bytes: &[u8],
        places: impl Iterator<Item = usize>,
        gathered: &mut Vec<u8>,
    ) {
        gathered.clear();
        for place in places {
            gathered.extend_from_slice(&bytes[self.byte_range(place..place + 1)]);
        }
    }

    /// The elements `span` of `bytes` as `to` into `target`, or the first value that does not fit.
    pub(super) fn read(
        &self,
        bytes: &[u8],
        span: Range<usize>,
        to: Dtype,
        target: &mut [u8],
    ) -> Result<(), f64> {
        let from = match self {
            Self::Floats(from) => *from,
            Self::F64 => return read_doubles(&bytes[self.byte_range(span)], to, target),
            Self::Blocks(blocks) => return self.read_blocks(*blocks, bytes, span, to, target),
            Self::Random(random) => return random.read(span, to, target).map_err(f64::from),
            Self::Other(what) => unreachable!("{what} is refused before it is read"),
        };
        let source = &bytes[self.byte_range(span)];
        Cast { from, to }.apply(source, target).map_err(f64::from)
    }

    fn read_blocks(
        &self,
        blocks: GgmlDType,
        bytes: &[u8],
        span: Range<usize>,
        to: Dtype,
        target: &mut [u8],
    ) -> Result<(), f64> {
        let per_block = blocks.block_size();
        let mut rest = target;
        let mut start = span.start;
        while start < span.end {
            let first = start / per_block * per_block;
            let end = span.end.min(first + PIECE); // a multiple of every block size
            let values = dequantise(blocks, &bytes[self.byte_range(start..end)]);
            let (piece, behind) = rest.split_at_mut((end - start) * to.size_bytes());
            narrow(to, &values[start - first..end - first], piece).map_err(f64::from)?;
            (rest, start) = (behind, end);
        }
        Ok(())
    }
}

/// The values of whole blocks.
fn dequantise(blocks: GgmlDType, bytes: &[u8]) -> Vec<f32> {
    let elements = bytes.len() / blocks.type_size() * blocks.block_size();
    match blocks.from_data(bytes.into()).dequantize(elements) {
        Ok(CpuStorage::F32(values)) => values,
        other => unreachable!("blocks become f32 on the CPU: {:?}", other.err()),
    }
}

fn read_doubles(source: &[u8], to: Dtype, target: &mut [u8]) -> Result<(), f64> {
    let pieces = source
        .chunks(PIECE * 8)
        .zip(target.chunks_mut(PIECE * to.size_bytes()));
    let mut values = Vec::with_capacity(PIECE.min(source.len() / 8));
    for (source, target) in pieces {
        values.clear();
        for bytes in source.as_chunks::<8>().0 {
            let double = f64::from_le_bytes(*bytes);
            let value = double as f32;
            if value.is_infinite() && double.is_finite() {
                return Err(double);
            }
            values.push(value);
        }
        narrow(to, &values, target).map_err(f64::from)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle::quantized::QTensor;
    use candle::{Device, Tensor};

    use super::*;

    const KINDS: [&str; 10] = [
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    ];

    #[test]
    fn any_span_of_blocks_is_what_candle_makes_of_all() {
        let count = 3 * PIECE + 512;
        let values: Vec<f32> = (0..count)
            .map(|i| ((i * 37) % 1001) as f32 / 500.0 - 1.0)
            .collect();
        let tensor = Tensor::new(values, &Device::Cpu).unwrap();
        for kind in KINDS {
            let elements = Elements::of(kind, 32);
            let Elements::Blocks(blocks) = elements else {
                panic!("{kind} is not known");
            };
            let quantised = QTensor::quantize(&tensor, blocks).unwrap();
            let whole = quantised.dequantize(&Device::Cpu).unwrap();
            let whole: Vec<f32> = whole.to_vec1().unwrap();
            let bytes = quantised.data().unwrap();
            assert_eq!(elements.byte_range(0..count), 0..bytes.len());
            for span in [
                0..count,
                0..1,
                31..33,
                255..257,
                100..PIECE + 300,
                count - 5..count,
            ] {
                let mut target = vec![0; span.len() * 4];
                elements
                    .read(&bytes, span.clone(), Dtype::F32, &mut target)
                    .unwrap();
                let expected: Vec<u8> = whole[span].iter().flat_map(|v| v.to_le_bytes()).collect();
                assert_eq!(target, expected, "{kind}");
            }
        }
        assert!(matches!(Elements::of("Q4_0", 33), Elements::Other(_)));
    }

    #[test]
    fn doubles_become_floats_or_are_named() {
        let bytes =
            |values: &[f64]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
        let mut target = [0; 8];
        let read = |values: &[f64], to, target: &mut [u8]| {
            Elements::F64.read(&bytes(values), 0..2, to, target)
        };
        read(&[0.1, f64::INFINITY], Dtype::F32, &mut target).unwrap();
        assert_eq!(target[..4], 0.1f32.to_le_bytes());
        assert_eq!(read(&[1e300, 0.0], Dtype::F32, &mut target), Err(1e300));
        assert_eq!(
            read(&[1.0, 70000.0], Dtype::F16, &mut target[..4]),
            Err(70000.0)
        );
    }
}
