//! Predictors of other programs: a PyTorch file a layer, with two matrices and no bias.
//!
//! | program | files | tensors `(rank, hidden)`, `(intermediate, rank)` | between | selected from the score |
//! |---|---|---|---|---|
//! | PowerInfer | `model_N.pt` | `fc1.weight`, `fc2.weight` | ReLU | `sparse_threshold` of `config.json`, else 0 |
//! | Deja Vu | `...layerN....pt` | `0.weight`, `1.weight` | nothing | 0, which is half by its sigmoid |
//!
//! Folders come from strangers: names and shapes are checked against the model before anything is written, values as
//! they are read, and nothing in a file is executed (`wick-checkpoint`).
//!
//! Not here: what their scores are worth (`import`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_wick::{Between, PredictorInput};
use wick_format::{Dtype, FfnLayer, Manifest, PredictorPart, StoredDtype, TensorSpec};

use crate::source::{file_name, read_text, SourceFolder, SourceTensor};
use crate::ConvertError;

/// Tensors of a layer in our file; the first two are those of the makers.
const PAIR: [PredictorPart; 3] = PredictorPart::PAIR;

/// Whose files they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Maker {
    PowerInfer,
    DejaVu,
}

impl Maker {
    const ALL: [Self; 2] = [Self::PowerInfer, Self::DejaVu];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::PowerInfer => "PowerInfer",
            Self::DejaVu => "Deja Vu",
        }
    }

    /// The names of the matrices: from the input, and to the neurons.
    fn tensors(self) -> [&'static str; 2] {
        match self {
            Self::PowerInfer => ["fc1.weight", "fc2.weight"],
            Self::DejaVu => ["0.weight", "1.weight"],
        }
    }

    pub(super) fn between(self) -> Between {
        match self {
            Self::PowerInfer => Between::Relu,
            Self::DejaVu => Between::None,
        }
    }

    /// What its programs show the predictors of such a model.
    pub(super) fn input(self, model_type: &str) -> PredictorInput {
        match (self, model_type) {
            (Self::PowerInfer, "falcon") => PredictorInput::LayerInput,
            _ => PredictorInput::AttentionResidual,
        }
    }
}

/// The predictors of a folder, all of one maker, one for each layer of a model.
pub(super) struct Foreign {
    pub(super) maker: Maker,
    /// Scores that reach this select.
    pub(super) threshold: f32,
    layers: Vec<ForeignLayer>,
}

struct ForeignLayer {
    file: SourceFolder,
    rank: usize,
    neurons: usize,
}

impl Foreign {
    /// Opens the predictors in `folder` for the model of `manifest`.
    ///
    /// # Errors
    /// A layer has no file or several, or there is a file for a layer that the model has not; a file holds other tensors than the
    /// two, of other shapes than the layer's, or is of another maker than the first; the threshold is no number.
    pub(super) fn open(folder: &Path, manifest: &Manifest) -> Result<Self, ConvertError> {
        let paths = layer_files(folder, manifest.layers.len())?;
        let mut maker = None;
        let mut layers = Vec::with_capacity(paths.len());
        for (path, layer) in paths.iter().zip(&manifest.layers) {
            let file = SourceFolder::torch_file(path)?;
            let found = maker_of(path, &file)?;
            let first = *maker.get_or_insert(found);
            if first != found {
                let (found, first) = (found.name(), first.name());
                let problem = format!("is a predictor of {found}, beside those of {first}");
                return Err(ConvertError::checkpoint(path, problem));
            }
            layers.push(ForeignLayer::new(file, found, layer)?);
        }
        let maker = maker.unwrap_or(Maker::PowerInfer);
        Ok(Self {
            maker,
            threshold: threshold(folder, maker)?,
            layers,
        })
    }

    /// Rank of each layer's predictor.
    pub(super) fn ranks(&self) -> Vec<usize> {
        self.layers.iter().map(|layer| layer.rank).collect()
    }

    /// The tensors of our file, in its order.
    pub(super) fn specs(&self, manifest: &Manifest) -> Result<Vec<TensorSpec>, ConvertError> {
        let mut specs = Vec::with_capacity(PAIR.len() * self.layers.len());
        for (foreign, layer) in self.layers.iter().zip(&manifest.layers) {
            for (index, part) in PAIR.into_iter().enumerate() {
                let dtype = match self.maker.tensors().get(index) {
                    Some(name) => foreign.dtype(name)?.into(),
                    None => StoredDtype::F32,
                };
                specs.push(part.spec(layer, dtype, foreign.rank));
            }
        }
        Ok(specs)
    }

    /// The bytes of tensor `index` of [`Self::specs`].
    pub(super) fn content(&self, index: usize) -> Result<Vec<u8>, ConvertError> {
        let layer = &self.layers[index / PAIR.len()];
        // Neither maker's files have a bias.
        match self.maker.tensors().get(index % PAIR.len()) {
            Some(name) => layer.bytes(name),
            None => Ok(vec![0; 4 * layer.neurons]),
        }
    }
}

impl ForeignLayer {
    fn new(file: SourceFolder, maker: Maker, layer: &FfnLayer) -> Result<Self, ConvertError> {
        let [down, up] = maker.tensors().map(|name| tensor(&file, name));
        let (hidden, neurons) = (layer.hidden_size, layer.intermediate_size);
        let rank = match *down.shape {
            [rank, width] if rank > 0 && width == hidden => rank,
            _ => {
                let expected = format!("[rank, {hidden}] for this model");
                return Err(wrong_shape(&file, down, expected));
            }
        };
        if up.shape != [neurons, rank] {
            let expected = format!("[{neurons}, {rank}] for this model and a rank of {rank}");
            return Err(wrong_shape(&file, up, expected));
        }
        Ok(Self {
            file,
            rank,
            neurons,
        })
    }

    /// As it is stored, if a predictor can be stored so; bf16 becomes f32, which loses nothing.
    fn dtype(&self, name: &str) -> Result<Dtype, ConvertError> {
        Ok(match self.file.dtype(tensor(&self.file, name))? {
            Dtype::F16 => Dtype::F16,
            Dtype::Bf16 | Dtype::F32 => Dtype::F32,
        })
    }

    fn bytes(&self, name: &str) -> Result<Vec<u8>, ConvertError> {
        let (tensor, dtype) = (tensor(&self.file, name), self.dtype(name)?);
        let (rows, width) = (tensor.rows(), tensor.width());
        let mut bytes = vec![0; rows * width * dtype.size_bytes()];
        self.file
            .read(tensor, 0..rows, 0..width, dtype, &mut bytes)?;
        self.file.release(tensor, 0..rows);
        match first_not_finite(dtype, &bytes) {
            None => Ok(bytes),
            Some((place, value)) => {
                let (row, column) = (place / width, place % width);
                let got = format!("{value} in row {row}, column {column}");
                Err(self.file.wrong(tensor, got, "finite numbers"))
            }
        }
    }
}

fn tensor<'a>(file: &'a SourceFolder, name: &str) -> &'a SourceTensor {
    file.get(name).expect("its maker is known by its names")
}

fn wrong_shape(file: &SourceFolder, tensor: &SourceTensor, expected: String) -> ConvertError {
    file.wrong(tensor, format!("of shape {:?}", tensor.shape), expected)
}

fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<(usize, f32)> {
    let value = |element: &[u8]| match *element {
        [a, b] => half::f16::from_le_bytes([a, b]).to_f32(),
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
        _ => 0.0,
    };
    let values = bytes.chunks_exact(dtype.size_bytes()).map(value);
    values.enumerate().find(|(_, value)| !value.is_finite())
}

fn maker_of(path: &Path, file: &SourceFolder) -> Result<Maker, ConvertError> {
    let mut names: Vec<&str> = file.names().collect();
    names.sort_unstable();
    let mut all = Maker::ALL.into_iter();
    all.find(|maker| names == maker.tensors()).ok_or_else(|| {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let problem = format!(
            "holds {}, not the two of PowerInfer (`fc1.weight`, `fc2.weight`) or Deja Vu (`0.weight`, `1.weight`)",
            match names.len() {
                0 => "no tensor".to_owned(),
                _ => crate::error::listed(&names),
            }
        );
        ConvertError::checkpoint(path, problem)
    })
}

/// The file of each layer, in the order of the layers.
fn layer_files(folder: &Path, layer_count: usize) -> Result<Vec<PathBuf>, ConvertError> {
    let entries = std::fs::read_dir(folder).map_err(ConvertError::io(folder, "read"))?;
    let mut files: BTreeMap<usize, PathBuf> = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(ConvertError::io(folder, "read"))?.path();
        let name = file_name(&path);
        let Some(stem) = name.strip_suffix(".pt") else {
            continue;
        };
        let Some(layer) = layer_number(stem) else {
            let problem = "says no layer: predictors are called model_N.pt or ...layerN....pt";
            return Err(ConvertError::checkpoint(&path, problem));
        };
        if layer >= layer_count {
            let problem = format!("is for layer {layer}, the model has {layer_count}, from 0 on");
            return Err(ConvertError::checkpoint(&path, problem));
        }
        if let Some(other) = files.insert(layer, path.clone()) {
            let problem = format!("is for layer {layer}, and so is {}", file_name(&other));
            return Err(ConvertError::checkpoint(&path, problem));
        }
    }
    let missing = (0..layer_count).filter(|layer| !files.contains_key(layer));
    let missing: Vec<String> = missing.map(|layer| layer.to_string()).collect();
    if files.is_empty() {
        let problem = "holds no predictors, neither model_N.pt nor ...layerN....pt";
        return Err(ConvertError::checkpoint(folder, problem));
    }
    if !missing.is_empty() {
        let missing = crate::error::listed(&missing);
        let problem = format!("has no predictor for layer {missing} of the model's {layer_count}");
        return Err(ConvertError::checkpoint(folder, problem));
    }
    Ok(files.into_values().collect())
}

/// `3` of `model_3` and of `c4_layer3_0.95-0.42`.
fn layer_number(stem: &str) -> Option<usize> {
    let rest = match stem.strip_prefix("model_") {
        Some(rest) => rest,
        None => stem.rsplit_once("layer")?.1,
    };
    let end = rest.find(|c: char| !c.is_ascii_digit());
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

/// `sparse_threshold` of a `config.json` beside PowerInfer's files.
fn threshold(folder: &Path, maker: Maker) -> Result<f32, ConvertError> {
    let path = folder.join("config.json");
    if maker != Maker::PowerInfer || !path.exists() {
        return Ok(0.0);
    }
    let config: serde_json::Value = serde_json::from_str(&read_text(&path)?)
        .map_err(|error| ConvertError::checkpoint(&path, format!("is no JSON: {error}")))?;
    let key = "sparse_threshold";
    let Some(value) = config.get(key) else {
        return Ok(0.0);
    };
    let number = value.as_f64().map(|value| value as f32);
    number
        .filter(|value| value.is_finite())
        .ok_or_else(|| ConvertError::Config {
            path,
            key: key.to_owned(),
            got: value.to_string(),
            expected: "a number".to_owned(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_layers() {
        for (stem, layer) in [
            ("model_0", Some(0)),
            ("model_31", Some(31)),
            ("c4_layer7_0.99-0.42", Some(7)),
            ("opt-1.3b-layer12", Some(12)),
            ("model_", None),
            ("predictor", None),
            ("layer99999999999999999999999", None),
        ] {
            assert_eq!(layer_number(stem), layer, "{stem}");
        }
    }

    #[test]
    fn values_that_are_none_are_found_in_both_widths() {
        let halves: Vec<u8> = [1.0, f32::INFINITY, f32::NAN]
            .iter()
            .flat_map(|value| half::f16::from_f32(*value).to_le_bytes())
            .collect();
        assert_eq!(
            first_not_finite(Dtype::F16, &halves),
            Some((1, f32::INFINITY))
        );
        let floats: Vec<u8> = [0.0f32, -1e30, f32::NAN]
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let (place, value) = first_not_finite(Dtype::F32, &floats).unwrap();
        assert!(place == 2 && value.is_nan());
        assert_eq!(first_not_finite(Dtype::F32, &floats[..8]), None);
    }
}
