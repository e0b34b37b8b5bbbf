//! Converted folders with random weights, for measuring: as large as a real model, and nothing to download.
//!
//! There is no second writer. The converter gets a source whose elements are made up as they are read
//! (`source::random`), so layout, checksums, bounded memory and taking up a killed run are its own. The predictors
//! come last; a folder that has some keeps them.
//!
//! The same geometry, layers, dtype and seed give the same bytes.

mod geometry;
mod predictors;
mod weights;

use std::cell::Cell;
use std::fs;
use std::path::Path;

use candle_wick::PREDICTORS_FILE;
use wick_format::{Dtype, FileEntry, FileHasher, Layout, Manifest, MANIFEST_FILE};

use crate::check::Checkpoint;
use crate::config::ModelConfig;
use crate::convert::write_folder;
use crate::source::read_text;
use crate::{ConvertError, ConvertOptions, ConvertProgress, ConvertReport};

pub use geometry::{Geometry, SYNTHETIC_KEY};

/// How to synthesise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticOptions {
    /// Element type of all weights; predictors are f16.
    pub dtype: Dtype,
    /// Which records a layer has.
    pub layout: Layout,
    /// How many of the first layers, `None` for all.
    pub layers: Option<usize>,
    /// Other weights for another one.
    pub seed: u64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticReport {
    /// The folder without the predictors.
    pub folder: ConvertReport,
    /// Size of the predictors' file.
    pub predictor_bytes: u64,
}

/// Writes a converted folder `out` with random weights and predictors.
///
/// `out` must not exist, or be empty, or hold an earlier result of the same call: an unfinished one is taken up.
///
/// # Errors
/// More layers are asked for than the model has, `out` holds something else or cannot be written, or the disk is full.
pub fn synthesise(
    geometry: &Geometry,
    out: &Path,
    options: &SyntheticOptions,
    progress: &dyn Fn(ConvertProgress<'_>),
) -> Result<SyntheticReport, ConvertError> {
    let layers = options.layers.unwrap_or(geometry.layers);
    if !(1..=geometry.layers).contains(&layers) {
        return Err(ConvertError::Unsupported {
            got: format!("a {geometry} of {layers} layers"),
            supported: format!("1 to {}", geometry.layers),
        });
    }
    let convert_options = ConvertOptions {
        dtype: Some(options.dtype),
        layout: options.layout,
        ..ConvertOptions::default()
    };
    let checkpoint = checkpoint(geometry, layers, options.seed, &convert_options)?;
    let ffn = checkpoint
        .layers
        .first()
        .map_or(0, |layer| layer.intermediate_size);
    let predictor_bytes = predictors::tensor_bytes(geometry, layers, checkpoint.hidden_size, ffn);
    let (done, total) = (Cell::new(0), Cell::new(0));
    let on_folder = |step: ConvertProgress<'_>| {
        done.set(step.done_bytes);
        total.set(step.total_bytes + predictor_bytes);
        progress(ConvertProgress {
            total_bytes: total.get(),
            ..step
        });
    };
    let folder = write_folder(
        checkpoint,
        Vec::new(),
        None,
        out,
        &convert_options,
        &on_folder,
    )?;

    let path = out.join(PREDICTORS_FILE);
    if let Ok(found) = fs::metadata(&path) {
        return Ok(SyntheticReport {
            folder,
            predictor_bytes: found.len(),
        });
    }
    let manifest_path = out.join(MANIFEST_FILE);
    let manifest = Manifest::parse(&read_text(&manifest_path)?)
        .map_err(ConvertError::format(&manifest_path))?;
    let on_written = |bytes| {
        done.set(done.get() + bytes);
        progress(ConvertProgress {
            done_bytes: done.get(),
            total_bytes: total.get().max(done.get()),
            step: PREDICTORS_FILE,
        });
    };
    let predictor_bytes = predictors::write(out, &manifest, geometry, options.seed, &on_written)?;
    Ok(SyntheticReport {
        folder,
        predictor_bytes,
    })
}

/// The model as a source for the converter.
fn checkpoint(
    geometry: &Geometry,
    layers: usize,
    seed: u64,
    options: &ConvertOptions,
) -> Result<Checkpoint, ConvertError> {
    let name = format!("synthetic-{geometry}");
    let config = ModelConfig::made(Path::new(&name), geometry.config(layers))?;
    // What the weights are is said by config and seed: they stand for the files of a checkpoint.
    let recipe = format!("seed {seed}\n{}", config.copied_text()?);
    let mut hasher = FileHasher::new();
    hasher.update(recipe.as_bytes());
    let made_from = FileEntry {
        name: name.clone(),
        size_bytes: recipe.len() as u64,
        xxh3: hasher.hex(),
    };
    let has_bias = Cell::new(false);
    let mut checkpoint = Checkpoint::made_up(config, made_from, options, |spec| {
        has_bias.set(weights::has_deciding_bias(spec));
        weights::source(&name, spec, seed)
    })?;
    let share = if has_bias.get() { "a third" } else { "a half" };
    let ranks = if geometry.has_assumed_ranks() {
        "of assumed ranks"
    } else {
        "of the paper's ranks"
    };
    checkpoint.notes.push(format!(
        "synthetic weights: about {share} of the neurons are active; random predictors {ranks} select a tenth"
    ));
    Ok(checkpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights of each model in millions, added up by hand from its sizes.
    #[test]
    fn every_geometry_is_a_model_of_the_right_size() {
        for (name, millions) in [
            ("opt-125m", 125),
            ("opt-1.3b", 1316),
            ("opt-6.7b", 6658),
            ("falcon-7b", 6922),
            ("persimmon-8b", 9397),
            ("llama-2-7b", 6738),
            ("phi-2", 2780),
        ] {
            let geometry = Geometry::find(name).unwrap();
            let options = ConvertOptions {
                dtype: Some(Dtype::F16),
                ..ConvertOptions::default()
            };
            let checkpoint = checkpoint(geometry, geometry.layers, 1, &options).unwrap();
            assert_eq!(checkpoint.layers.len(), geometry.layers);
            assert_eq!(checkpoint.ignored_tensors, [""; 0]);
            let weights = checkpoint.dense_weight_bytes() / 2;
            assert_eq!(
                (weights + 500_000) / 1_000_000,
                millions,
                "{name}: {weights}"
            );
        }
        assert_eq!(Geometry::all().len(), 7);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let error = Geometry::find("opt-7b").unwrap_err().to_string();
        assert!(
            error.contains("`opt-7b`") && error.contains("opt-6.7b, falcon-7b"),
            "{error}"
        );
        let folder = tempfile::tempdir().unwrap();
        let geometry = Geometry::find("opt-125m").unwrap();
        for layers in [0, 13] {
            let options = SyntheticOptions {
                dtype: Dtype::F16,
                layout: Layout::Neuron,
                layers: Some(layers),
                seed: 1,
            };
            let out = folder.path().join("out");
            let error = synthesise(geometry, &out, &options, &|_| {}).unwrap_err();
            assert!(error.to_string().contains("1 to 12"), "{error}");
            assert!(!out.exists());
        }
    }
}
