//! Predictors in closed form: which neurons a ReLU-family layer needs, without training.
//!
//! `fit` runs the model over a text, keeps every FFN's inputs, and for each layer takes the best low-rank
//! approximation of the deciding matrix (`factor`), then the threshold that reaches the asked recall on a part
//! of the text that the fit has not seen, and measures on another such part. The result is
//! `predictors.safetensors` in the model's folder, replaced as a whole.

mod capture;
mod factor;
mod threshold;

use std::path::{Path, PathBuf};

use candle::{DType, Device, Tensor};
use candle_wick::{Memory, PredictorMetadata, SelectorKind, PREDICTORS_FILE};
use candle_wick_models::{Interrupt, LoadOptions, LoadedModel, WickTokenizer};
use wick_format::{crc32c, ChecksumBlocks, FfnLayer, FileLayout, StoredDtype, TensorSpec};

use crate::output::OutputFolder;
use crate::ConvertError;
use capture::Capture;
use factor::Factors;
pub use threshold::LayerQuality;
use threshold::Truth;

/// How to fit.
#[derive(Clone, Debug)]
pub struct FitOptions {
    /// Rank of each layer's predictor.
    pub rank: usize,
    /// Share of the truly active neurons that a threshold has to select.
    pub recall: f64,
    /// Tokens of the text to use at most, spread over it.
    pub tokens: usize,
    /// Budget of the model while it runs.
    pub memory: Option<Memory>,
    /// Stops the fit.
    pub interrupt: Interrupt,
}

impl Default for FitOptions {
    fn default() -> Self {
        let (memory, interrupt) = (None, Interrupt::new());
        Self {
            rank: 64,
            recall: 0.97,
            tokens: 65_536,
            memory,
            interrupt,
        }
    }
}

/// How far a fit is: tokens while capturing, then layers.
#[derive(Clone, Copy, Debug)]
pub struct FitProgress {
    /// What is counted.
    pub step: &'static str,
    /// How many are done.
    pub done: usize,
    /// Of how many.
    pub total: usize,
}

/// What was fitted.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FitReport {
    /// The file written.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Rank of each layer's predictor.
    pub rank: usize,
    /// Tokens used for the fit, for the thresholds, and for the measures.
    pub tokens: [usize; 3],
    /// The measures, a layer each.
    pub layers: Vec<LayerQuality>,
}

/// Fits a predictor for each layer of the converted model on `text` and writes them into its folder.
pub fn fit(
    model: &Path,
    text: &Path,
    options: &FitOptions,
    progress: &dyn Fn(FitProgress),
) -> Result<FitReport, ConvertError> {
    let problem = |path: &Path, problem: &str| ConvertError::Checkpoint {
        path: path.to_owned(),
        problem: problem.to_owned(),
    };
    if !(options.recall > 0.0 && options.recall <= 1.0) || options.rank == 0 {
        return Err(problem(
            model,
            "needs a rank of at least 1 and a recall above 0, at most 1",
        ));
    }
    let load = LoadOptions {
        selector: Some(SelectorKind::Dense),
        memory: options.memory,
        interrupt: options.interrupt.clone(),
        ..LoadOptions::default()
    };
    let mut loaded = candle_wick_models::load(model, &load)?;
    if !loaded.activation().is_relu_like() {
        let name = loaded.activation().name();
        let problem_text = format!(
            "has activation {name}, whose neurons are never exactly zero: nothing to predict"
        );
        return Err(problem(model, &problem_text));
    }
    let ids = ids_of(model, text, loaded.ctx(), options.tokens)?;
    let total = ids.len();
    let done = std::cell::Cell::new(0);
    let capture = Capture::record(&mut loaded, model, &ids, &|tokens| {
        done.set(done.get() + tokens);
        progress(FitProgress {
            step: "tokens",
            done: done.get(),
            total,
        });
    })?;
    let parts = Parts::of(total);
    let layers = loaded.folder().manifest().layers.clone();
    let mut fitted = Vec::with_capacity(layers.len());
    for (index, layer) in layers.iter().enumerate() {
        if options.interrupt.is_triggered() {
            return Err(candle_wick_models::Error::Interrupted.into());
        }
        let x = capture.inputs(index, layer.hidden_size)?;
        let one = fit_layer(&loaded, layer, &x, &parts, options);
        fitted.push(one.map_err(candle_wick_models::Error::from)?);
        progress(FitProgress {
            step: "layers",
            done: index + 1,
            total: layers.len(),
        });
    }
    write(
        model,
        &loaded,
        &layers,
        &fitted,
        options,
        [parts.fit, parts.tune, parts.measure],
    )
}

/// How many tokens serve which purpose; they follow each other in the text.
struct Parts {
    fit: usize,
    tune: usize,
    measure: usize,
}

impl Parts {
    fn of(tokens: usize) -> Self {
        let (tune, measure) = (tokens / 10, tokens / 10);
        Self {
            fit: tokens - tune - measure,
            tune,
            measure,
        }
    }
}

/// The ids of the text: whole blocks of the context, spread evenly over it when there are more than wanted.
fn ids_of(model: &Path, text: &Path, ctx: usize, tokens: usize) -> Result<Vec<u32>, ConvertError> {
    let tokenizer = WickTokenizer::load(model)?.ok_or_else(|| ConvertError::Checkpoint {
        path: model.to_owned(),
        problem: "has no tokenizer.json, which a text needs".to_owned(),
    })?;
    let content = std::fs::read_to_string(text).map_err(ConvertError::io(text, "read"))?;
    let ids = tokenizer.encode(&content)?;
    let (blocks, wanted) = (ids.len() / ctx, tokens.div_ceil(ctx));
    if blocks < 10 {
        return Err(ConvertError::Checkpoint {
            path: text.to_owned(),
            problem: format!(
                "has {} tokens; a fit needs at least {}",
                ids.len(),
                10 * ctx
            ),
        });
    }
    let kept = wanted.clamp(10, blocks);
    let starts = (0..kept).map(|block| block * blocks / kept * ctx);
    Ok(starts
        .flat_map(|start| ids[start..start + ctx].iter().copied())
        .collect())
}

fn fit_layer(
    model: &LoadedModel,
    layer: &FfnLayer,
    x: &Tensor,
    parts: &Parts,
    options: &FitOptions,
) -> candle::Result<(Factors, LayerQuality)> {
    let dense = model.dense_weights();
    let (name, bias) = match &layer.gate {
        Some(gate) => (gate, &layer.gate_bias),
        None => (&layer.up, &layer.up_bias),
    };
    let weight = dense.get((layer.intermediate_size, layer.hidden_size), name)?;
    let bias = match bias {
        Some(name) => dense.get(layer.intermediate_size, name)?,
        None => Tensor::zeros(layer.intermediate_size, DType::F32, &Device::Cpu)?,
    };
    let factors = Factors::fit(&weight, &bias, &x.narrow(0, 0, parts.fit)?, options.rank)?;
    // Thresholds are for the factors as they are stored.
    let rounded = |tensor: &Tensor| tensor.to_dtype(DType::F16)?.to_dtype(DType::F32);
    let factors = Factors {
        down: rounded(&factors.down)?,
        up: rounded(&factors.up)?,
        bias: factors.bias,
    };
    let truth = Truth {
        weight: &weight,
        bias: &bias,
    };
    let tune = x.narrow(0, parts.fit, parts.tune)?;
    let threshold = truth.threshold(&factors, &tune, options.recall)?;
    let measure = x.narrow(0, parts.fit + parts.tune, parts.measure)?;
    let quality = truth.quality(&factors, &measure, threshold)?;
    Ok((factors, quality))
}

fn write(
    folder: &Path,
    model: &LoadedModel,
    layers: &[FfnLayer],
    fitted: &[(Factors, LayerQuality)],
    options: &FitOptions,
    tokens: [usize; 3],
) -> Result<FitReport, ConvertError> {
    let of = |value: fn(&LayerQuality) -> f32| {
        fitted.iter().map(|(_, quality)| value(quality)).collect()
    };
    let metadata = PredictorMetadata {
        model_hash: model.folder().manifest().model_hash.clone(),
        input: "ffn_input".to_owned(),
        between: "none".to_owned(),
        thresholds: of(|quality| quality.threshold),
        recall: of(|quality| quality.recall),
        selected_fraction: of(|quality| quality.selected_fraction),
        union_fraction: of(|quality| quality.union_fraction),
    };
    let mut tensors = Vec::new();
    for (layer, (factors, _)) in layers.iter().zip(fitted) {
        let name = |part: &str| format!("{}.predictor.{part}", layer.prefix);
        tensors.push((name("down.weight"), StoredDtype::F16, &factors.down));
        tensors.push((name("up.weight"), StoredDtype::F16, &factors.up));
        tensors.push((name("up.bias"), StoredDtype::F32, &factors.bias));
    }
    let path = folder.join(PREDICTORS_FILE);
    let mut specs = Vec::new();
    let mut contents = std::collections::BTreeMap::new();
    for (name, dtype, tensor) in &tensors {
        specs.push(TensorSpec::new(name, *dtype, tensor.dims()));
        let bytes = bytes_of(tensor, *dtype).map_err(candle_wick_models::Error::from)?;
        contents.insert(name.clone(), bytes);
    }
    for (name, dtype, tensor) in &tensors {
        let blocks =
            ChecksumBlocks::of(tensor.dims(), *dtype).map_err(ConvertError::format(&path))?;
        let checksums: Vec<u8> = (0..blocks.block_count())
            .flat_map(|block| {
                let range = blocks.block_bytes_range(block);
                crc32c(&contents[name][range.start as usize..range.end as usize]).to_le_bytes()
            })
            .collect();
        let checksums_name = ChecksumBlocks::tensor_name(name);
        specs.push(TensorSpec::new(
            &checksums_name,
            StoredDtype::U32,
            &[blocks.block_count()],
        ));
        contents.insert(checksums_name, checksums);
    }
    let layout =
        FileLayout::new(&specs, &metadata.to_map()).map_err(ConvertError::format(&path))?;
    let output = OutputFolder::open(folder)?;
    let entry = output.write_file(PREDICTORS_FILE, layout.total_bytes(), |file| {
        file.write(layout.header_bytes())?;
        for (name, extent) in layout.entries() {
            match contents.get(name) {
                Some(bytes) => file.write(bytes)?,
                None => file.write(&vec![0; extent.len_bytes as usize])?, // padding, below 4096 bytes
            }
        }
        Ok(())
    })?;
    let layers = fitted.iter().map(|(_, quality)| *quality).collect();
    Ok(FitReport {
        path,
        bytes: entry.size_bytes,
        rank: options.rank,
        tokens,
        layers,
    })
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
