//! A writer of GGUF files, and of tensors as llama.cpp's converter leaves them.

use candle::quantized::{GgmlDType, QTensor};
use candle::{Device, Tensor};
use half::{bf16, f16};
use safetensors::Dtype as FileDtype;

use crate::tiny::Stored;

/// A file: metadata in its order, tensors with ggml's number of their type.
#[derive(Clone, Default)]
pub(crate) struct GgufFile {
    pub(crate) metadata: Vec<(String, Value)>,
    pub(crate) tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
}

#[derive(Clone)]
pub(crate) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Ints(Vec<i32>),
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::U32(number as u32)
    }
}

impl From<f32> for Value {
    fn from(number: f32) -> Self {
        Self::F32(number)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Bool(flag)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Value {
    fn bytes(&self) -> Vec<u8> {
        let array = |kind: u32, count: usize, items: Vec<u8>| {
            [
                &9u32.to_le_bytes()[..],
                &kind.to_le_bytes(),
                &(count as u64).to_le_bytes(),
                &items,
            ]
            .concat()
        };
        match self {
            Self::U32(number) => [4u32, *number].map(u32::to_le_bytes).concat(),
            Self::F32(number) => [6u32.to_le_bytes(), number.to_le_bytes()].concat(),
            Self::Bool(flag) => [&7u32.to_le_bytes()[..], &[u8::from(*flag)]].concat(),
            Self::Text(text) => [&8u32.to_le_bytes()[..], &string(text)].concat(),
            Self::Texts(texts) => array(
                8,
                texts.len(),
                texts.iter().flat_map(|t| string(t)).collect(),
            ),
            Self::Ints(ints) => array(
                5,
                ints.len(),
                ints.iter().flat_map(|n| n.to_le_bytes()).collect(),
            ),
        }
    }
}

impl GgufFile {
    pub(crate) fn of(architecture: &str) -> Self {
        let mut this = Self::default();
        this.set("general.architecture", architecture);
        this
    }

    /// Sets a key, to another value if it is there.
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.metadata.retain(|(known, _)| known != key);
        self.metadata.push((key.into(), value.into()));
    }

    pub(crate) fn without(mut self, key: &str) -> Self {
        self.metadata.retain(|(known, _)| known != key);
        self
    }

    pub(crate) fn add(&mut self, name: &str, tensor: &Stored) {
        let (dtype, shape, bytes) = tensor;
        let kind = match dtype {
            FileDtype::F32 => 0,
            FileDtype::F16 => 1,
            FileDtype::BF16 => 30,
            other => panic!("{other:?}"),
        };
        self.tensors
            .push((name.into(), shape.clone(), kind, bytes.clone()));
    }

    /// Quantises every matrix; returns what its values then are.
    pub(crate) fn quantise(&mut self, kind: GgmlDType) -> Vec<(String, Vec<f32>)> {
        let mut values_of = Vec::new();
        for (name, shape, number, bytes) in
            self.tensors.iter_mut().filter(|tensor| tensor.1.len() == 2)
        {
            let values = floats(*number, bytes);
            let tensor = Tensor::from_vec(values, shape.clone(), &Device::Cpu).unwrap();
            let quantised = QTensor::quantize(&tensor, kind).unwrap();
            let back = quantised.dequantize(&Device::Cpu).unwrap();
            values_of.push((name.clone(), back.flatten_all().unwrap().to_vec1().unwrap()));
            (*number, *bytes) = (number_of(kind), quantised.data().unwrap().into_owned());
        }
        values_of
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            bytes.extend(string(key));
            bytes.extend(value.bytes());
        }
        let mut offset = 0;
        for (name, shape, number, data) in &self.tensors {
            bytes.extend(string(name));
            bytes.extend((shape.len() as u32).to_le_bytes());
            bytes.extend(
                shape
                    .iter()
                    .rev()
                    .flat_map(|&dim| (dim as u64).to_le_bytes()),
            );
            bytes.extend(number.to_le_bytes());
            bytes.extend((offset as u64).to_le_bytes());
            offset += data.len().next_multiple_of(32);
        }
        for (.., data) in &self.tensors {
            bytes.resize(bytes.len().next_multiple_of(32), 0);
            bytes.extend(data);
        }
        bytes
    }
}

/// Kinds of blocks by ggml's number.
const KINDS: [(GgmlDType, u32); 10] = [
    (GgmlDType::Q4_0, 2),
    (GgmlDType::Q4_1, 3),
    (GgmlDType::Q5_0, 6),
    (GgmlDType::Q5_1, 7),
    (GgmlDType::Q8_0, 8),
    (GgmlDType::Q2K, 10),
    (GgmlDType::Q3K, 11),
    (GgmlDType::Q4K, 12),
    (GgmlDType::Q5K, 13),
    (GgmlDType::Q6K, 14),
];

pub(crate) fn kinds() -> impl Iterator<Item = GgmlDType> {
    KINDS.into_iter().map(|(kind, _)| kind)
}

fn number_of(kind: GgmlDType) -> u32 {
    KINDS.iter().find(|(known, _)| *known == kind).unwrap().1
}

fn floats(number: u32, bytes: &[u8]) -> Vec<f32> {
    match number {
        0 => bytes
            .chunks(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect(),
        1 => bytes
            .chunks(2)
            .map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f32())
            .collect(),
        _ => bytes
            .chunks(2)
            .map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f32())
            .collect(),
    }
}

/// The rows of a tensor in another order: row `n` of the result is row `order[n]`.
pub(crate) fn rows_in_order(tensor: &Stored, order: &[usize]) -> Stored {
    let (dtype, shape, bytes) = tensor;
    let row_bytes = bytes.len() / shape[0];
    let row = |&n: &usize| &bytes[n * row_bytes..][..row_bytes];
    (
        *dtype,
        shape.clone(),
        order.iter().flat_map(row).copied().collect(),
    )
}

/// llama.cpp's order of the rows of q or k: dimension `i` of the first half of a head beside that of the second.
pub(crate) fn paired(heads: usize, head_dim: usize) -> Vec<usize> {
    let half = head_dim / 2;
    let pairs = |head: usize| {
        (0..half).flat_map(move |i| [head * head_dim + i, head * head_dim + half + i])
    };
    (0..heads).flat_map(pairs).collect()
}

/// llama.cpp's order of Falcon's fused rows: from groups of queries, a key and a value to all of each.
pub(crate) fn separated(groups: usize, queries: usize, head_dim: usize) -> Vec<usize> {
    let head = |group: usize, n: usize| {
        let start = (group * (queries + 2) + n) * head_dim;
        start..start + head_dim
    };
    let all = |range: std::ops::Range<usize>| {
        (0..groups).flat_map(move |group| range.clone().flat_map(move |n| head(group, n)))
    };
    all(0..queries)
        .chain(all(queries..queries + 1))
        .chain(all(queries + 1..queries + 2))
        .collect()
}
