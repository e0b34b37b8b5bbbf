//! Predictors of every kind: forms, dtypes, what they look at. Who is selected, and that nothing else depends on it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use candle::{DType, Device, Module, Tensor, D};
use candle_wick::{
    Activation, FlashFolder, FlashMlp, FlashVarBuilder, IoOptions, Lookahead, Placement, Predictor,
    PredictorForm, PredictorInput, Residuals, SelectorKind, Switches,
};
use candle_wick_models::{LoadOptions, LoadedModel};
use wick_format::StoredDtype;
use wick_kernels::PackedBits;

use crate::demo::{assets, demo};
use crate::exactness::{fingerprint, with_slots};
use crate::support::{converted_as, expected, fixture};

mod commands;
mod file;
mod lies;
mod memory;
mod reference;

use file::{metadata_of, PredictorTensors};

const INPUTS: [PredictorInput; 3] = [
    PredictorInput::FfnInput,
    PredictorInput::AttentionResidual,
    PredictorInput::LayerInput,
];

/// One of each family, blocks one after the other and side by side, gated and not.
const FIXTURES: [&str; 7] = [
    "opt-pre-ln",
    "opt-350m-post-ln",
    "llama-relu-gqa-f16",
    "sparsellama-fatrelu",
    "falcon-relu-by-option",
    "phi-relu",
    "persimmon",
];

/// A converted fixture, and a place for files.
struct Case {
    folder: tempfile::TempDir,
    place: tempfile::TempDir,
    ids: Vec<u32>,
}

impl Case {
    fn of(name: &str) -> Self {
        let expected = expected(name);
        Self {
            folder: converted_as(&fixture(name), &expected.convert),
            place: tempfile::tempdir().unwrap(),
            ids: expected.ids,
        }
    }

    fn file(&self) -> PathBuf {
        self.place.path().join("other.safetensors")
    }

    fn open(&self) -> FlashFolder {
        FlashFolder::open(self.folder.path(), IoOptions::default()).unwrap()
    }

    /// The folder with these predictors, which lie elsewhere.
    fn with(&self, predictors: &PredictorTensors) -> candle_wick::Result<FlashFolder> {
        predictors.write(&self.file());
        FlashFolder::open_with(self.folder.path(), IoOptions::default(), Some(&self.file()))
    }

    /// A file of each form and dtype, looking at `input`.
    fn kinds(&self, input: PredictorInput) -> Vec<(String, PredictorTensors)> {
        let (folder, input) = (self.open(), input.name());
        let low_rank = |between: &str, dtype| {
            let made = PredictorTensors::low_rank(&folder, input, between, dtype);
            (format!("lowrank {dtype} {between} {input}"), made)
        };
        let gate = |bits: PackedBits| {
            let made = PredictorTensors::gate(&folder, input, bits);
            (format!("gate {bits:?} {input}"), made)
        };
        let mut kinds = vec![
            low_rank("none", StoredDtype::F32),
            low_rank("relu", StoredDtype::F16),
            low_rank("relu", StoredDtype::I8),
        ];
        kinds.extend(PackedBits::ALL.map(gate));
        kinds
    }
}

fn selector(folder: &FlashFolder) -> SelectorKind {
    SelectorKind::of(folder.predictors().unwrap().unwrap().form)
}

/// What was shown of one layer: rows of inputs of each kind, and the neurons of each token.
#[derive(Clone, Default)]
struct Shown {
    inputs: [Vec<f32>; 3],
    selected: Vec<Vec<u32>>,
}

/// Runs `ids` through `model` and keeps what its layers saw and chose.
fn watch(model: &mut LoadedModel, ids: &[u32]) -> Vec<Shown> {
    let layers = model.folder().manifest().layers.len();
    let shown = Arc::new(Mutex::new(vec![Shown::default(); layers]));
    for (at, kind) in INPUTS.into_iter().enumerate() {
        let shown = shown.clone();
        let keep = move |layer: usize, rows: &[f32]| {
            shown.lock().unwrap()[layer].inputs[at].extend_from_slice(rows);
        };
        model.record_inputs(kind, Some(Box::new(keep)));
    }
    let selections = shown.clone();
    model.record_selections(Some(Box::new(move |layer, neurons| {
        selections.lock().unwrap()[layer]
            .selected
            .push(neurons.to_vec());
    })));
    // A prompt, then tokens one by one.
    let (prompt, rest) = ids.split_at(ids.len() - 3);
    model.forward(prompt).unwrap();
    for id in rest {
        model.forward(&[*id]).unwrap();
    }
    model.record_selections(None);
    for kind in INPUTS {
        model.record_inputs(kind, None);
    }
    let shown = shown.lock().unwrap();
    shown.clone()
}

#[test]
fn those_are_selected_whose_score_of_the_right_input_reaches_the_threshold() {
    for name in FIXTURES {
        let case = Case::of(name);
        for (at, input) in INPUTS.into_iter().enumerate() {
            for (what, predictors) in case.kinds(input) {
                let folder = case.with(&predictors).unwrap();
                let mut model = with_slots(&folder, selector(&folder), 24);
                let shown = watch(&mut model, &case.ids);
                let mut some = 0;
                for (index, layer) in shown.iter().enumerate() {
                    let hidden = folder.manifest().layers[index].hidden_size;
                    assert_eq!(layer.selected.len(), case.ids.len(), "{name} {what}");
                    let inputs = layer.inputs[at].chunks(hidden);
                    assert_eq!(inputs.len(), case.ids.len(), "{name} {what}");
                    for (x, selected) in inputs.zip(&layer.selected) {
                        let scores = predictors.scores(&folder, index, x);
                        check_selection(&scores, selected, &format!("{name} {what} {index}"));
                        some += selected.len();
                    }
                    let predictor = Predictor::load(&folder, index).unwrap();
                    assert_eq!(predictor.input(), input);
                    let scores = predictor.scores(&layer.inputs[at]).unwrap();
                    let of_tokens = scores.chunks(scores.len() / case.ids.len());
                    for (scores, selected) in of_tokens.zip(&layer.selected) {
                        let reaching = (0u32..).zip(scores).filter(|(_, score)| **score >= 0.0);
                        let reaching: Vec<u32> = reaching.map(|(neuron, _)| neuron).collect();
                        assert_eq!(reaching, *selected, "{name} {what}");
                    }
                }
                let all: usize = folder
                    .manifest()
                    .layers
                    .iter()
                    .map(|l| l.intermediate_size)
                    .sum();
                let share = some as f64 / (all * case.ids.len()) as f64;
                assert!((0.1..0.9).contains(&share), "{name} {what}: {share}");
            }
        }
    }
}

/// Scores computed in another way differ in their last bits, and so may who is at the threshold of 0.
fn check_selection(scores: &[f64], selected: &[u32], what: &str) {
    let largest = scores
        .iter()
        .fold(0f64, |most, score| most.max(score.abs()));
    for (neuron, score) in scores.iter().enumerate() {
        let is_selected = selected.binary_search(&(neuron as u32)).is_ok();
        let is_clear = score.abs() > 1e-5 * largest;
        assert!(
            !is_clear || is_selected == (*score > 0.0),
            "{what}: neuron {neuron} has {score}"
        );
    }
}

#[test]
fn every_kind_gives_the_same_bytes_at_every_budget_and_thread_count() {
    for name in FIXTURES {
        let case = Case::of(name);
        for input in INPUTS {
            let mut fingerprints = Vec::new();
            for (what, predictors) in case.kinds(input) {
                let folder = case.with(&predictors).unwrap();
                let ffn = folder.manifest().layers[0].intermediate_size;
                let mut reference = None;
                for (slots, threads) in [(5, 1), (ffn / 2, 3), (ffn, 1)] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    let mut model = with_slots(&folder, selector(&folder), slots);
                    let run = || fingerprint(&mut model, &case.ids);
                    let got = pool.build().unwrap().install(run);
                    let reference = reference.get_or_insert_with(|| got.clone());
                    assert!(*reference == got, "{name} {what}: {slots} slots");
                }
                fingerprints.push(reference);
            }
            fingerprints.dedup();
            assert_eq!(
                fingerprints.len(),
                6,
                "{name}: other selections, other numbers"
            );
        }
    }
}

/// The last row of `x` under a norm over its values, which has a bias or (RMS) none.
fn normed(x: &[f32], weight: &Tensor, bias: Option<&Tensor>) -> Vec<f32> {
    let hidden = weight.elem_count();
    let norm = || -> candle::Result<Vec<f32>> {
        let x = Tensor::from_slice(x, (x.len() / hidden, hidden), &Device::Cpu)?;
        let centred = match bias {
            Some(_) => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
            None => x,
        };
        let variance = (centred.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?;
        let y = centred
            .broadcast_div(&variance.sqrt()?)?
            .broadcast_mul(weight)?;
        let y = match bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        y.flatten_all()?.to_vec1()
    };
    norm().unwrap()
}

fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        let gap = (got - want).abs();
        assert!(gap <= 2e-4 * (1.0 + want.abs()), "{what}: {got}, {want}");
    }
}

/// The residual stream is what the FFN's own input is the norm of: before attention where blocks are side by side, after it
/// where they follow each other.
#[test]
fn models_show_predictors_the_residual_stream_in_the_right_places() {
    let (after, before) = (1, 2);
    for (name, norm, at) in [
        (
            "opt-pre-ln",
            "model.decoder.layers.N.final_layer_norm",
            after,
        ),
        (
            "opt-350m-post-ln",
            "model.decoder.layers.N.self_attn_layer_norm",
            after,
        ),
        (
            "llama-relu-gqa-f16",
            "model.layers.N.post_attention_layernorm",
            after,
        ),
        (
            "persimmon",
            "model.layers.N.post_attention_layernorm",
            after,
        ),
        ("falcon-relu-by-option", "transformer.h.N.ln_mlp", before),
        ("phi-relu", "model.layers.N.input_layernorm", before),
    ] {
        let case = Case::of(name);
        let mut model = with_slots(&case.open(), SelectorKind::Dense, usize::MAX);
        let shown = watch(&mut model, &case.ids);
        let dense = model.dense_weights();
        for (index, layer) in shown.iter().enumerate() {
            let norm = dense.pp(norm.replace('N', &index.to_string()));
            let hidden = model.folder().manifest().layers[index].hidden_size;
            let weight = norm.get(hidden, "weight").unwrap();
            let has_bias = norm.contains_tensor("bias");
            let bias = has_bias.then(|| norm.get(hidden, "bias").unwrap());
            let want = normed(&layer.inputs[at], &weight, bias.as_ref());
            assert_close(&layer.inputs[0], &want, &format!("{name} {index}"));
        }
        // What a layer gives is what comes into the next one: the stream after attention, and the FFN's output on it.
        if name.starts_with("llama") || name.contains("post-ln") {
            continue;
        }
        for (index, pair) in shown.windows(2).enumerate() {
            let y = ffn_output(&model, index, &pair[0].inputs[0]);
            let sum = pair[0].inputs[after].iter().zip(&y).map(|(x, y)| x + y);
            let sum: Vec<f32> = sum.collect();
            assert_close(&pair[1].inputs[before], &sum, &format!("{name} {index}"));
        }
    }
}

/// `down act(up x)` with dense matrices.
fn ffn_output(model: &LoadedModel, index: usize, x: &[f32]) -> Vec<f32> {
    let layer = &model.folder().manifest().layers[index];
    let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
    let dense = model.dense_weights();
    let run = || -> candle::Result<Vec<f32>> {
        let x = Tensor::from_slice(x, (x.len() / hidden, hidden), &Device::Cpu)?;
        let bias = |name: &Option<String>, len: usize| match name {
            Some(name) => dense.get(len, name),
            None => Tensor::zeros(len, DType::F32, &Device::Cpu),
        };
        let up = x.matmul(&dense.get((ffn, hidden), &layer.up)?.t()?)?;
        let up = up.broadcast_add(&bias(&layer.up_bias, ffn)?)?.relu()?;
        let activated = match model.activation() {
            Activation::Relu => up,
            _ => up.sqr()?,
        };
        let y = activated.matmul(&dense.get((hidden, ffn), &layer.down)?.t()?)?;
        let y = y.broadcast_add(&bias(&layer.down_bias, hidden)?)?;
        y.flatten_all()?.to_vec1()
    };
    run().unwrap()
}

#[test]
fn guesses_change_nothing_whatever_they_look_at() {
    let case = Case::of("opt-pre-ln");
    for input in INPUTS {
        let mut guessed = 0;
        for (what, predictors) in case.kinds(input) {
            let folder = case.with(&predictors).unwrap();
            let run = |lookahead| {
                let options = LoadOptions {
                    slots_per_layer: Some(200),
                    switches: Switches {
                        lookahead,
                        ..Switches::default()
                    },
                    ..LoadOptions::default()
                };
                let mut model = LoadedModel::load(folder.clone(), &options).unwrap();
                (fingerprint(&mut model, &case.ids), model.stats().ahead_read)
            };
            let (without, none) = run(Lookahead::Off);
            let (with, some) = run(Lookahead::Always);
            assert!(none == 0 && without == with, "{what}");
            guessed += some;
        }
        // Some select more than there are slots, and are not guessed for.
        assert!(guessed > 0, "{input}");
    }
}

/// A layer of candle's kind, alone.
#[test]
fn layers_say_by_name_what_they_are_not_given() {
    let case = Case::of("falcon-relu-by-option");
    let x = |seed: usize| {
        let values = file::values(3 * 32, seed);
        Tensor::from_vec(values, (1, 3, 32), &Device::Cpu).unwrap()
    };
    let (own, other) = (x(1), x(2));
    let bits = |y: candle::Result<Tensor>| {
        let y = y.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        y.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
    };
    for input in INPUTS {
        let predictors = PredictorTensors::gate(&case.open(), input.name(), PackedBits::Four);
        let folder = case.with(&predictors).unwrap();
        let placement = Placement::resident(&folder, SelectorKind::Gate);
        let vb = FlashVarBuilder::new(&folder, placement);
        let vb = ["transformer", "h", "0", "mlp"]
            .iter()
            .fold(vb, |vb, part| vb.pp(part));
        let mlp = FlashMlp::load(32, 64, Activation::Relu, vb).unwrap();
        let both = |layer_input, after_attention| {
            let residuals = Residuals {
                layer_input,
                after_attention,
            };
            mlp.forward_with(&own, residuals)
        };
        let mut y = vec![0.0; 96];
        let rows = own.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let alone = [
            mlp.forward(&own).map(|_| ()),
            mlp.begin(&own)
                .and_then(|ticket| ticket.finish())
                .map(|_| ()),
            mlp.forward_rows(&rows, &mut y).map_err(candle::Error::wrap),
        ];
        if input == PredictorInput::FfnInput {
            assert!(alone.iter().all(Result::is_ok));
            assert_eq!(bits(mlp.forward(&own)), bits(both(&other, &other)));
        } else {
            for result in alone {
                let error = result.unwrap_err().to_string();
                let place = "transformer.h.0.mlp";
                assert!(
                    error.contains(place) && error.contains(input.name()),
                    "{error}"
                );
            }
            assert_ne!(bits(both(&own, &own)), bits(both(&other, &other)));
        }
        // Begun before attention or not, the same.
        let begun = mlp.begin_with(&own, &other).unwrap();
        assert_eq!(bits(begun.finish_with(&own)), bits(both(&other, &own)));
        let begun = mlp.begin_with(&own, &other).unwrap();
        match input {
            PredictorInput::AttentionResidual => assert!(begun.finish().is_err()),
            _ => assert_eq!(bits(begun.finish()), bits(both(&other, &own))),
        }
        let narrow = x(3).narrow(1, 0, 2).unwrap();
        assert_eq!(
            both(&narrow, &narrow).is_ok(),
            input == PredictorInput::FfnInput
        );
    }
}

#[test]
fn files_from_before_forms_were_written_are_low_rank() {
    let own = assets().join("predictors.safetensors");
    let metadata = metadata_of(&own);
    let mut old: Vec<&str> = metadata.keys().map(String::as_str).collect();
    old.retain(|key| ["form", "made_by"].contains(key));
    let folder = demo();
    let opened = FlashFolder::open(folder.path(), IoOptions::default()).unwrap();
    let found = opened.predictors().unwrap().unwrap();
    assert_eq!(found.form, PredictorForm::LowRank);
    assert_eq!(found.input, PredictorInput::FfnInput);
    assert_eq!(old.is_empty(), found.made_by.is_none());
    // One with the keys that it had then, and no others.
    let case = Case::of("opt-pre-ln");
    let dtype = StoredDtype::F16;
    let mut file = PredictorTensors::low_rank(&case.open(), "ffn_input", "none", dtype);
    file.metadata.remove("form").unwrap();
    let folder = case.with(&file).unwrap();
    let found = folder.predictors().unwrap().unwrap();
    assert_eq!(
        (found.form, &found.made_by),
        (PredictorForm::LowRank, &None)
    );
    with_slots(&folder, SelectorKind::LowRank, 20)
        .forward(&case.ids)
        .unwrap();
}
