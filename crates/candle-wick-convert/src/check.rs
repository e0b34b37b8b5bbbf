//! The checked checkpoint: config, tensors and options matched with each other, before anything is
//! written.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_wick::{Activation, Error};
use wick_format::{Dtype, FileEntry};

use crate::config::{ModelConfig, CONFIG_FILE};
use crate::family::{family_of, Family, LayerSpec, ModelSpec, TensorNeed};
use crate::source::{Shards, SourceFolder};
use crate::{gguf, head, ConvertError, ConvertOptions};

/// A checkpoint that can be converted.
pub(crate) struct Checkpoint {
    pub(crate) source: SourceFolder,
    /// The folder whose other files belong to the model, `None` when the source is a single file.
    pub(crate) folder: Option<PathBuf>,
    /// Whether config and vocabulary come from a GGUF file.
    pub(crate) is_gguf: bool,
    pub(crate) model_type: String,
    pub(crate) hidden_size: usize,
    pub(crate) layers: Vec<LayerSpec>,
    /// Element type of the records.
    pub(crate) dtype: Dtype,
    /// Everything that is not an FFN matrix, with the dtype that it will have.
    pub(crate) resident: Vec<(TensorNeed, Dtype)>,
    /// Text of the copied `config.json`.
    pub(crate) config_text: String,
    /// What it was made from where that is no file.
    pub(crate) made_from: Option<FileEntry>,
    pub(crate) ignored_tensors: Vec<String>,
    pub(crate) notes: Vec<String>,
}

impl Checkpoint {
    pub(crate) fn open(path: &Path, options: &ConvertOptions) -> Result<Self, ConvertError> {
        let found = Shards::find(path)?;
        let mut notes: Vec<String> = found.note().into_iter().collect();
        let (mut config, opened) = if found.is_gguf() {
            if path.join(CONFIG_FILE).exists() {
                notes.push(format!(
                    "{CONFIG_FILE} is left out: the GGUF file has its own"
                ));
            }
            let (config, source) = gguf::open(&found)?;
            (config, Some(source))
        } else {
            (ModelConfig::read(path)?, None)
        };
        let family = family_of(&config)?;
        (family.modernise)(&mut config)?;
        override_activation(family, &mut config, options, &mut notes);
        check_activation(family, &config)?;
        let spec = (family.spec)(&config)?;
        let mut source = match opened {
            Some(source) => source,
            None => SourceFolder::open(&found, family.rename)?,
        };
        (family.split)(&config, &mut source)?;
        Ok(Self {
            folder: found.source_folder().map(Path::to_path_buf),
            is_gguf: found.is_gguf(),
            ..Self::matched(config, spec, source, options, notes)?
        })
    }

    /// A model of this config whose weights are made up: `tensors` gives the source for all that it needs.
    pub(crate) fn made_up(
        config: ModelConfig,
        made_from: FileEntry,
        options: &ConvertOptions,
        tensors: impl FnOnce(&ModelSpec) -> SourceFolder,
    ) -> Result<Self, ConvertError> {
        let spec = (family_of(&config)?.spec)(&config)?;
        let source = tensors(&spec);
        Ok(Self {
            made_from: Some(made_from),
            ..Self::matched(config, spec, source, options, Vec::new())?
        })
    }

    /// Config, needs and source, matched with each other.
    fn matched(
        mut config: ModelConfig,
        mut spec: ModelSpec,
        source: SourceFolder,
        options: &ConvertOptions,
        mut notes: Vec<String>,
    ) -> Result<Self, ConvertError> {
        check_present(&spec, &source)?;

        let choice = head::choose(&spec, &source)?;
        notes.extend(choice.note);
        if let Some(tied) = choice.tied_edit {
            config.set("tie_word_embeddings", tied);
        }
        if choice.keep {
            spec.resident.push(spec.head.clone());
        }
        let ffn = ffn_matrices(&spec);
        check_shapes(spec.resident.iter().chain(&ffn), &source)?;
        let dtype = ffn_dtype(&ffn, &source, options, &mut notes)?;
        notes.extend(quantised_note(
            spec.resident.iter().chain(&ffn),
            &source,
            options,
        ));
        let resident = with_dtypes(&spec.resident, &source, options)?;
        let ignored_tensors = ignored(&spec, &ffn, &source, &mut notes);
        let config_text = config.copied_text()?;
        // What cannot be run later must not take an hour to convert.
        candle_wick_models::check_config(config.path(), &config_text)?;
        Ok(Self {
            model_type: config.text("model_type")?.to_string(),
            config_text,
            folder: None,
            is_gguf: false,
            made_from: None,
            hidden_size: spec.hidden_size,
            layers: spec.layers,
            source,
            dtype,
            resident,
            ignored_tensors,
            notes,
        })
    }

    /// Bytes of all weights in the dtypes that they will have.
    pub(crate) fn dense_weight_bytes(&self) -> u64 {
        let bytes = |need: &TensorNeed, dtype: Dtype| {
            need.shape.iter().product::<usize>() as u64 * dtype.size_bytes() as u64
        };
        let resident = self
            .resident
            .iter()
            .map(|(need, dtype)| bytes(need, *dtype));
        let ffn = self
            .layers
            .iter()
            .flat_map(|layer| layer.matrices(self.hidden_size));
        resident.sum::<u64>() + ffn.map(|need| bytes(&need, self.dtype)).sum::<u64>()
    }
}

/// Puts the activation that the user asks for into the config.
fn override_activation(
    family: &Family,
    config: &mut ModelConfig,
    options: &ConvertOptions,
    notes: &mut Vec<String>,
) {
    if let Some(activation) = &options.activation {
        let key = family.activation_key;
        config.set(key, activation.as_str());
        notes.push(format!(
            "{key} is {activation} in the copied config.json, as asked for"
        ));
    }
}

/// Refuses an activation that no layer can compute. Without one the family's default holds; the parameter that some
/// need is checked with the rest of the config.
fn check_activation(family: &Family, config: &ModelConfig) -> Result<(), ConvertError> {
    let key = family.activation_key;
    if !config.has(key) {
        return Ok(());
    }
    match config.text(key)?.parse::<Activation>() {
        Err(Error::UnknownName { known, .. }) => Err(config.wrong(key, format!("one of {known}"))),
        _ => Ok(()),
    }
}

fn ffn_matrices(spec: &ModelSpec) -> Vec<TensorNeed> {
    spec.layers
        .iter()
        .flat_map(|layer| layer.matrices(spec.hidden_size))
        .collect()
}

/// Every tensor is there; all missing ones are named at once.
fn check_present(spec: &ModelSpec, source: &SourceFolder) -> Result<(), ConvertError> {
    let ffn = ffn_matrices(spec);
    let needed = spec.resident.iter().chain(&ffn);
    let names: Vec<String> = needed
        .filter(|need| source.get(&need.name).is_none())
        .map(|need| need.name.clone())
        .collect();
    if names.is_empty() {
        return Ok(());
    }
    let total = spec.resident.len() + ffn.len();
    Err(ConvertError::MissingTensors {
        folder: source.path.clone(),
        total,
        names,
    })
}

/// Every tensor has the shape that the config says, and a dtype for weights.
fn check_shapes<'a>(
    needs: impl Iterator<Item = &'a TensorNeed>,
    source: &SourceFolder,
) -> Result<(), ConvertError> {
    for need in needs {
        if let Some(tensor) = source.get(&need.name) {
            source.dtype(tensor)?;
            if tensor.shape != need.shape {
                let got = format!("of shape {:?}", tensor.shape);
                let expected = format!("{:?} by config.json", need.shape);
                return Err(source.wrong(tensor, got, expected));
            }
        }
    }
    Ok(())
}

/// One dtype for all records: the wanted one, or that of most FFN weights.
fn ffn_dtype(
    ffn: &[TensorNeed],
    source: &SourceFolder,
    options: &ConvertOptions,
    notes: &mut Vec<String>,
) -> Result<Dtype, ConvertError> {
    if let Some(dtype) = options.dtype {
        return Ok(dtype);
    }
    let mut elements_of: BTreeMap<Dtype, usize> = BTreeMap::new();
    for tensor in ffn.iter().filter_map(|need| source.get(&need.name)) {
        *elements_of.entry(source.dtype(tensor)?).or_default() +=
            tensor.shape.iter().product::<usize>();
    }
    // The first of equals: f32 before f16 before bf16, so that nothing is lost.
    let most = elements_of
        .iter()
        .rev()
        .max_by_key(|(_, &elements)| elements);
    let dtype = most.map_or(Dtype::F32, |(&dtype, _)| dtype);
    if elements_of.len() > 1 {
        let found: Vec<&str> = elements_of.keys().map(|dtype| dtype.name()).collect();
        notes.push(format!(
            "the FFN weights are stored in {}: all records are in {dtype}, the most common",
            found.join(" and ")
        ));
    }
    Ok(dtype)
}

/// What becomes of quantised weights when the user does not say.
fn quantised_note<'a>(
    mut needs: impl Iterator<Item = &'a TensorNeed>,
    source: &SourceFolder,
    options: &ConvertOptions,
) -> Option<String> {
    let is_quantised = |need: &TensorNeed| source.get(&need.name).is_some_and(|t| t.is_quantised());
    (options.dtype.is_none() && needs.any(is_quantised)).then(|| {
        "the weights are quantised: they are written as f16, which `--dtype` changes".to_string()
    })
}

fn with_dtypes(
    needs: &[TensorNeed],
    source: &SourceFolder,
    options: &ConvertOptions,
) -> Result<Vec<(TensorNeed, Dtype)>, ConvertError> {
    let mut resident = Vec::with_capacity(needs.len());
    for need in needs {
        if let Some(tensor) = source.get(&need.name) {
            let dtype = options.dtype.unwrap_or(source.dtype(tensor)?);
            resident.push((need.clone(), dtype));
        }
    }
    Ok(resident)
}

/// Tensors that the model does not have; those that are known to be computed become one note.
fn ignored(
    spec: &ModelSpec,
    ffn: &[TensorNeed],
    source: &SourceFolder,
    notes: &mut Vec<String>,
) -> Vec<String> {
    let mut known: BTreeSet<&str> = spec
        .resident
        .iter()
        .chain(ffn)
        .map(|need| need.name.as_str())
        .collect();
    known.insert(&spec.head.name);
    let unknown = source.names().filter(|name| !known.contains(name));
    let is_computed = |name: &&str| spec.computed.iter().any(|ending| name.ends_with(ending));
    let (computed, ignored): (Vec<&str>, Vec<&str>) = unknown.partition(is_computed);
    if let Some(first) = computed.first() {
        let count = computed.len();
        notes.push(format!(
            "{count} tensors such as {first} are left out: config.json gives them"
        ));
    }
    if !ignored.is_empty() {
        let count = ignored.len();
        notes.push(format!(
            "{count} tensors that a model of this type does not have are left out"
        ));
    }
    ignored.into_iter().map(str::to_string).collect()
}
