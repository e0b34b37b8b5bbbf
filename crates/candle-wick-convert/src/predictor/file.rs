//! `predictors.safetensors`: the factors of all layers as extra tensors, replaced as a whole.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle::{DType, Tensor};
use candle_wick::{PredictorMetadata, PREDICTORS_FILE};
use wick_format::{crc32c, ChecksumBlocks, FileLayout, Manifest, StoredDtype, TensorSpec};

use super::factor::Factors;
use super::threshold::LayerQuality;
use crate::output::OutputFolder;
use crate::ConvertError;

/// Tensors in the order of the file, with their bytes.
#[derive(Default)]
struct Tensors {
    specs: Vec<TensorSpec>,
    contents: BTreeMap<String, Vec<u8>>,
}

/// Writes the file into `folder`; gives its path and size.
pub(super) fn write(
    folder: &Path,
    manifest: &Manifest,
    fitted: &[(Factors, LayerQuality)],
) -> Result<(PathBuf, u64), ConvertError> {
    let path = folder.join(PREDICTORS_FILE);
    let mut tensors = Tensors::default();
    for (layer, (factors, _)) in manifest.layers.iter().zip(fitted) {
        let name = |part| layer.predictor_tensor(part);
        tensors.add(name("down.weight"), StoredDtype::F16, &factors.down)?;
        tensors.add(name("up.weight"), StoredDtype::F16, &factors.up)?;
        tensors.add(name("up.bias"), StoredDtype::F32, &factors.bias)?;
    }
    tensors
        .add_checksums()
        .map_err(ConvertError::format(&path))?;
    let metadata = metadata(manifest, fitted).to_map();
    let layout = FileLayout::new(&tensors.specs, &metadata).map_err(ConvertError::format(&path))?;
    let output = OutputFolder::open(folder)?;
    let entry = output.write_file(PREDICTORS_FILE, layout.total_bytes(), |file| {
        file.write(layout.header_bytes())?;
        for (name, extent) in layout.entries() {
            match tensors.contents.get(name) {
                Some(bytes) => file.write(bytes)?,
                None => file.write(&vec![0; extent.len_bytes as usize])?, // padding, below 4096 bytes
            }
        }
        Ok(())
    })?;
    Ok((path, entry.size_bytes))
}

fn metadata(manifest: &Manifest, fitted: &[(Factors, LayerQuality)]) -> PredictorMetadata {
    let of = |value: fn(&LayerQuality) -> f32| {
        fitted.iter().map(|(_, quality)| value(quality)).collect()
    };
    PredictorMetadata {
        model_hash: manifest.model_hash.clone(),
        input: "ffn_input".to_owned(),
        between: "none".to_owned(),
        thresholds: of(|quality| quality.threshold),
        recall: of(|quality| quality.recall),
        selected_fraction: of(|quality| quality.selected_fraction),
        union_fraction: of(|quality| quality.union_fraction),
    }
}

impl Tensors {
    fn add(
        &mut self,
        name: String,
        dtype: StoredDtype,
        tensor: &Tensor,
    ) -> Result<(), ConvertError> {
        let bytes = bytes_of(tensor, dtype).map_err(candle_wick_models::Error::from)?;
        self.specs
            .push(TensorSpec::new(&name, dtype, tensor.dims()));
        self.contents.insert(name, bytes);
        Ok(())
    }

    /// One checksum tensor for each tensor so far.
    fn add_checksums(&mut self) -> Result<(), wick_format::FormatError> {
        for spec in self.specs.clone() {
            let blocks = ChecksumBlocks::of(&spec.shape, spec.dtype)?;
            let bytes = &self.contents[&spec.name];
            let checksum = |block| {
                let range = blocks.block_bytes_range(block);
                crc32c(&bytes[range.start as usize..range.end as usize]).to_le_bytes()
            };
            let checksums = (0..blocks.block_count()).flat_map(checksum).collect();
            let name = ChecksumBlocks::tensor_name(&spec.name);
            self.specs.push(TensorSpec::new(
                &name,
                StoredDtype::U32,
                &[blocks.block_count()],
            ));
            self.contents.insert(name, checksums);
        }
        Ok(())
    }
}

fn bytes_of(tensor: &Tensor, dtype: StoredDtype) -> candle::Result<Vec<u8>> {
    let tensor = tensor.flatten_all()?;
    Ok(match dtype {
        StoredDtype::F16 => {
            let values = tensor.to_dtype(DType::F16)?.to_vec1::<half::f16>()?;
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        }
        _ => tensor
            .to_vec1::<f32>()?
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    })
}
