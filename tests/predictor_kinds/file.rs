//! Files of predictors put together by hand, as they may come from anywhere.

use std::collections::BTreeMap;
use std::path::Path;

use candle_wick::FlashFolder;
use half::f16;
use wick_format::{
    crc32c, ChecksumBlocks, FfnLayer, FileLayout, StoredDtype, TensorIndex, TensorSpec,
};
use wick_kernels::{pack_row, packed_groups, PackedBits};

/// Metadata and tensors, checksums aside.
#[derive(Clone)]
pub struct PredictorTensors {
    pub metadata: BTreeMap<String, String>,
    pub tensors: Vec<(TensorSpec, Vec<u8>)>,
}

/// Values in -1..1 that repeat nowhere soon.
pub fn values(count: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| ((seed * 7919 + i) as f32 * 0.611).sin();
    (0..count).map(value).collect()
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

impl PredictorTensors {
    fn new(folder: &FlashFolder, form: &str, input: &str, between: &str) -> Self {
        let layers = folder.manifest().layers.len();
        let list = |value: &str| vec![value; layers].join(" ");
        let metadata = [
            ("model_hash", folder.manifest().neurons_hash().to_owned()),
            ("form", form.to_owned()),
            ("input", input.to_owned()),
            ("between", between.to_owned()),
            ("thresholds", list("0")),
            ("recall", list("0.9")),
            ("selected_fraction", list("0.5")),
            ("union_fraction", list("0.8")),
        ];
        let owned = metadata.map(|(key, value)| (key.to_owned(), value));
        Self {
            metadata: owned.into_iter().collect(),
            tensors: Vec::new(),
        }
    }

    /// Low-rank pairs of rank 8, stored as `dtype`.
    pub fn low_rank(folder: &FlashFolder, input: &str, between: &str, dtype: StoredDtype) -> Self {
        let mut file = Self::new(folder, "lowrank", input, between);
        for (index, layer) in folder.manifest().layers.iter().enumerate() {
            let (hidden, ffn, rank) = (layer.hidden_size, layer.intermediate_size, 8);
            file.matrix(layer, "down", [rank, hidden], dtype, 2 * index);
            file.matrix(layer, "up", [ffn, rank], dtype, 2 * index + 1);
            let bias = f32_bytes(&vec![0.0; ffn]);
            file.add(layer, "up.bias", StoredDtype::F32, &[ffn], bias);
        }
        file
    }

    fn matrix(
        &mut self,
        layer: &FfnLayer,
        part: &str,
        shape: [usize; 2],
        dtype: StoredDtype,
        seed: usize,
    ) {
        let weights = values(shape[0] * shape[1], seed);
        let bytes = match dtype {
            StoredDtype::F32 => f32_bytes(&weights),
            StoredDtype::F16 => {
                let halves = weights.iter().map(|weight| f16::from_f32(*weight));
                halves.flat_map(|weight| weight.to_le_bytes()).collect()
            }
            StoredDtype::I8 => weights
                .iter()
                .map(|weight| (weight * 127.0) as i8 as u8)
                .collect(),
            other => unreachable!("no weights of {other}"),
        };
        self.add(layer, &format!("{part}.weight"), dtype, &shape, bytes);
        if dtype == StoredDtype::I8 {
            let scales = values(shape[0], seed + 100);
            let (name, scales) = (format!("{part}.scale"), f32_bytes(&scales));
            self.add(layer, &name, StoredDtype::F32, &shape[..1], scales);
        }
    }

    /// Quantised gates of weights that are nobody's.
    pub fn gate(folder: &FlashFolder, input: &str, bits: PackedBits) -> Self {
        let mut file = Self::new(folder, "gate", input, "none");
        for (index, layer) in folder.manifest().layers.iter().enumerate() {
            let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
            let mut packed = vec![0; ffn * bits.row_bytes(hidden)];
            let mut scales = vec![0; ffn * 2 * packed_groups(hidden)];
            let weights = values(ffn * hidden, index);
            let rows = weights
                .chunks(hidden)
                .zip(packed.chunks_mut(bits.row_bytes(hidden)));
            for ((row, packed), scales) in rows.zip(scales.chunks_mut(2 * packed_groups(hidden))) {
                pack_row(bits, row, &vec![1.0; hidden], packed, scales);
            }
            let row = bits.row_bytes(hidden);
            file.add(layer, "gate.weight", StoredDtype::U8, &[ffn, row], packed);
            let groups = packed_groups(hidden);
            file.add(
                layer,
                "gate.scale",
                StoredDtype::F16,
                &[ffn, groups],
                scales,
            );
            let bias = f32_bytes(&vec![0.0; ffn]);
            file.add(layer, "gate.bias", StoredDtype::F32, &[ffn], bias);
        }
        file
    }

    fn add(
        &mut self,
        layer: &FfnLayer,
        part: &str,
        dtype: StoredDtype,
        shape: &[usize],
        bytes: Vec<u8>,
    ) {
        let spec = TensorSpec::new(format!("{}.predictor.{part}", layer.prefix), dtype, shape);
        self.tensors.push((spec, bytes));
    }

    /// The first tensor whose name ends with `part`.
    pub fn tensor(&mut self, part: &str) -> &mut (TensorSpec, Vec<u8>) {
        let mut all = self.tensors.iter_mut();
        all.find(|(spec, _)| spec.name.ends_with(part)).unwrap()
    }

    /// Gives the first such tensor another shape, perhaps another dtype, and as many zeros as that takes.
    pub fn retype(&mut self, part: &str, dtype: Option<StoredDtype>, shape: &[usize]) {
        let (spec, bytes) = self.tensor(part);
        spec.dtype = dtype.unwrap_or(spec.dtype);
        spec.shape = shape.to_vec();
        *bytes = vec![0; shape.iter().product::<usize>() * spec.dtype.size_bytes()];
    }

    pub fn write(&self, path: &Path) {
        let mut contents = BTreeMap::new();
        let (mut specs, mut checksum_specs) = (Vec::new(), Vec::new());
        for (spec, bytes) in &self.tensors {
            let blocks = ChecksumBlocks::of(&spec.shape, spec.dtype).unwrap();
            let name = ChecksumBlocks::tensor_name(&spec.name);
            let checksum = |block| {
                let range = blocks.block_bytes_range(block);
                crc32c(&bytes[range.start as usize..range.end as usize])
            };
            let checksums =
                (0..blocks.block_count()).flat_map(|block| checksum(block).to_le_bytes());
            contents.insert(name.clone(), checksums.collect::<Vec<u8>>());
            contents.insert(spec.name.clone(), bytes.clone());
            let shape = [blocks.block_count()];
            checksum_specs.push(TensorSpec::new(name, StoredDtype::U32, &shape));
            specs.push(spec.clone());
        }
        specs.extend(checksum_specs);
        let layout = FileLayout::new(&specs, &self.metadata).unwrap();
        let mut file = layout.header_bytes().to_vec();
        for (name, extent) in layout.entries() {
            let padding = || vec![0; extent.len_bytes as usize];
            file.extend(contents.get(name).cloned().unwrap_or_else(padding));
        }
        std::fs::write(path, file).unwrap();
    }
}

/// The metadata of a file.
pub fn metadata_of(path: &Path) -> BTreeMap<String, String> {
    let bytes = std::fs::read(path).unwrap();
    let len_bytes = bytes.len() as u64;
    let header = TensorIndex::header_len_bytes(bytes[..8].try_into().unwrap(), len_bytes).unwrap();
    TensorIndex::parse(&bytes[8..8 + header], len_bytes)
        .unwrap()
        .metadata
}
