//! Layers that are trained already, kept beside the output until all are: a killed run is taken up where it was.
//!
//! A file a layer, `layer-3-<key>.safetensors`, renamed into place when it is whole. The key is a hash of everything
//! that the pairs depend on, so those of other options, texts or models are passed over. A file that cannot be read, or
//! has other shapes, is as good as none.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle::{DType, Device, Tensor};
use wick_format::{FfnLayer, FileHasher};

use super::factor::Factors;
use super::trainee::Trained;
use crate::output::{partial_name, OutputFolder};
use crate::source::file_name;
use crate::ConvertError;

const SUFFIX: &str = ".training";

/// The folder of one output's layers; this process alone uses it.
pub(super) struct Work {
    folder: OutputFolder,
    key: String,
}

impl Work {
    /// Opens the folder beside the file `out`, for what `described` and `ids` lead to.
    pub(super) fn open(out: &Path, described: &str, ids: &[u32]) -> Result<Self, ConvertError> {
        let mut hasher = FileHasher::new();
        hasher.update(described.as_bytes());
        ids.iter().for_each(|id| hasher.update(&id.to_le_bytes()));
        let name = format!(".{}{SUFFIX}", file_name(out));
        Ok(Self {
            folder: OutputFolder::open(&out.with_file_name(name))?,
            key: hasher.hex(),
        })
    }

    fn name(&self, index: usize) -> String {
        format!("layer-{index}-{}.safetensors", self.key)
    }

    /// The pair of layer `index`, if it was finished.
    pub(super) fn finished(&self, index: usize, layer: &FfnLayer, rank: usize) -> Option<Trained> {
        let path = self.folder.path().join(self.name(index));
        let tensors = candle::safetensors::load(path, &Device::Cpu).ok()?;
        let matrix = |name: &str, shape: &[usize]| {
            let tensor = tensors.get(name)?;
            (tensor.dims() == shape).then(|| tensor.to_dtype(DType::F32).ok())?
        };
        let epochs = tensors.get("epochs")?.to_vec1::<u32>().ok()?;
        Some(Trained {
            factors: Factors {
                down: matrix("down", &[rank, layer.hidden_size])?,
                up: matrix("up", &[layer.intermediate_size, rank])?,
                bias: matrix("bias", &[layer.intermediate_size])?,
            },
            epochs: *epochs.first()? as usize,
        })
    }

    /// Keeps the pair of layer `index`.
    pub(super) fn keep(&self, index: usize, trained: &Trained) -> Result<(), ConvertError> {
        let name = self.name(index);
        let path = self.folder.path().join(&name);
        let partial = self.folder.path().join(partial_name(&name));
        let saved = trained
            .tensors()
            .and_then(|tensors| candle::safetensors::save(&tensors, &partial));
        saved.map_err(candle_wick_models::Error::from)?;
        fs::rename(&partial, &path).map_err(ConvertError::io(&path, "write"))
    }

    /// Removes the folder, with what this program wrote into it.
    pub(super) fn remove(self) -> Result<(), ConvertError> {
        let folder = self.folder.path();
        let entries = fs::read_dir(folder).map_err(ConvertError::io(folder, "read"))?;
        for entry in entries.flatten() {
            if is_of_training(&entry.path()) {
                self.folder.remove_file(&file_name(&entry.path()))?;
            }
        }
        let _holds_something_else = fs::remove_dir(folder);
        Ok(())
    }
}

impl Trained {
    fn tensors(&self) -> candle::Result<HashMap<String, Tensor>> {
        let Factors { down, up, bias } = &self.factors;
        let epochs = Tensor::new(&[self.epochs as u32], &Device::Cpu)?;
        Ok(HashMap::from([
            // Their values are those of 16-bit numbers already.
            ("down".to_owned(), down.to_dtype(DType::F16)?),
            ("up".to_owned(), up.to_dtype(DType::F16)?),
            ("bias".to_owned(), bias.clone()),
            ("epochs".to_owned(), epochs),
        ]))
    }
}

fn is_of_training(path: &Path) -> bool {
    let name = file_name(path);
    let name = name.trim_start_matches('.').trim_end_matches(".partial");
    name.starts_with("layer-") && name.ends_with(".safetensors")
}

#[cfg(test)]
mod tests {
    use super::super::example_layer::example_layer;
    use super::*;

    fn layer() -> FfnLayer {
        example_layer(3, 5)
    }

    fn pair() -> Trained {
        let full = |value: f32, shape: &[usize]| Tensor::full(value, shape, &Device::Cpu).unwrap();
        Trained {
            factors: Factors {
                down: full(0.5, &[2, 3]),
                up: full(-0.25, &[5, 2]),
                bias: full(0.1, &[5]),
            },
            epochs: 4,
        }
    }

    #[test]
    fn a_layer_comes_back_for_the_same_run_and_shape_only() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("p.safetensors");
        let work = Work::open(&out, "options", &[1, 2]).unwrap();
        assert!(work.finished(3, &layer(), 2).is_none());
        work.keep(3, &pair()).unwrap();
        let back = work.finished(3, &layer(), 2).unwrap();
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values(&back.factors.up), values(&pair().factors.up));
        assert_eq!(values(&back.factors.bias), values(&pair().factors.bias));
        assert_eq!(back.epochs, 4);
        assert!(work.finished(2, &layer(), 2).is_none());
        assert!(work.finished(3, &layer(), 1).is_none());
        // One run at a time.
        assert!(Work::open(&out, "options", &[1, 2]).is_err());
        drop(work);
        for (options, ids) in [("others", &[1, 2][..]), ("options", &[1, 3])] {
            let work = Work::open(&out, options, ids).unwrap();
            assert!(work.finished(3, &layer(), 2).is_none(), "{options} {ids:?}");
        }
    }

    #[test]
    fn a_broken_file_is_none_and_only_our_own_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("p.safetensors");
        let work = Work::open(&out, "options", &[]).unwrap();
        work.keep(0, &pair()).unwrap();
        let path = work.folder.path().join(work.name(0));
        let bytes = fs::read(&path).unwrap();
        for broken in [&bytes[..bytes.len() - 1], &bytes[..9], b""] {
            fs::write(&path, broken).unwrap();
            assert!(work.finished(0, &layer(), 2).is_none());
        }
        let place = work.folder.path().to_owned();
        fs::write(place.join("somebody's"), "").unwrap();
        work.remove().unwrap();
        assert_eq!(fs::read_dir(&place).unwrap().count(), 1);
    }
}
