//! `predictors.safetensors`: the factors of all layers as extra tensors, replaced as a whole.
//!
//! One tensor is in memory at a time; where they come from is the caller's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_wick::{PredictorMetadata, PREDICTORS_FILE};
use wick_format::{
    crc32c, ChecksumBlocks, FfnLayer, FileLayout, Manifest, StoredDtype, TensorSpec,
};

use crate::output::OutputFolder;
use crate::ConvertError;

/// A tensor of a layer's predictor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// `(rank, hidden)`.
    Down,
    /// `(intermediate, rank)`.
    Up,
    /// `(intermediate)`.
    Bias,
}

impl Part {
    /// In the order of the file.
    const ALL: [Self; 3] = [Self::Down, Self::Up, Self::Bias];

    /// Element type in the file.
    pub(crate) fn dtype(self) -> StoredDtype {
        match self {
            Self::Down | Self::Up => StoredDtype::F16,
            Self::Bias => StoredDtype::F32,
        }
    }

    /// This part of a layer's predictor of rank `rank`.
    pub(crate) fn spec(self, layer: &FfnLayer, rank: usize) -> TensorSpec {
        let ffn = layer.intermediate_size;
        let (name, shape) = match self {
            Self::Down => ("down.weight", &[rank, layer.hidden_size][..]),
            Self::Up => ("up.weight", &[ffn, rank][..]),
            Self::Bias => ("up.bias", &[ffn][..]),
        };
        TensorSpec::new(layer.predictor_tensor(name), self.dtype(), shape)
    }
}

/// Writes the file into `folder`, a predictor of rank `ranks[n]` for layer `n`; gives its path and size.
///
/// `content(n, part)` gives the bytes of that tensor, and is called in the order of the file.
pub(crate) fn write(
    folder: &Path,
    manifest: &Manifest,
    metadata: &PredictorMetadata,
    ranks: &[usize],
    content: &dyn Fn(usize, Part) -> Result<Vec<u8>, ConvertError>,
) -> Result<(PathBuf, u64), ConvertError> {
    let path = folder.join(PREDICTORS_FILE);
    let mut specs = Vec::new();
    let mut checksum_specs = Vec::new();
    let mut sources = BTreeMap::new();
    for (n, (layer, rank)) in manifest.layers.iter().zip(ranks).enumerate() {
        for part in Part::ALL {
            let spec = part.spec(layer, *rank);
            let blocks =
                ChecksumBlocks::of(&spec.shape, spec.dtype).map_err(ConvertError::format(&path))?;
            let name = ChecksumBlocks::tensor_name(&spec.name);
            let shape = [blocks.block_count()];
            checksum_specs.push(TensorSpec::new(name, StoredDtype::U32, &shape));
            sources.insert(spec.name.clone(), (n, part, blocks));
            specs.push(spec);
        }
    }
    specs.extend(checksum_specs);
    let layout =
        FileLayout::new(&specs, &metadata.to_map()).map_err(ConvertError::format(&path))?;
    let output = OutputFolder::open(folder)?;
    output.check_room(layout.total_bytes())?;
    let entry = output.write_file(PREDICTORS_FILE, layout.total_bytes(), |file| {
        file.write(layout.header_bytes())?;
        let mut checksums_of = BTreeMap::new();
        for (name, extent) in layout.entries() {
            if let Some((n, part, blocks)) = sources.get(name) {
                let bytes = content(*n, *part)?;
                checksums_of.insert(ChecksumBlocks::tensor_name(name), checksums(blocks, &bytes));
                file.write(&bytes)?;
            } else if let Some(checksums) = checksums_of.remove(name) {
                file.write(&checksums)?;
            } else {
                file.write(&vec![0; extent.len_bytes as usize])?; // padding, below 4096 bytes
            }
        }
        Ok(())
    })?;
    Ok((path, entry.size_bytes))
}

/// The checksums of a tensor, as their tensor holds them.
fn checksums(blocks: &ChecksumBlocks, bytes: &[u8]) -> Vec<u8> {
    let checksum = |block| {
        let range = blocks.block_bytes_range(block);
        crc32c(&bytes[range.start as usize..range.end as usize]).to_le_bytes()
    };
    (0..blocks.block_count()).flat_map(checksum).collect()
}
