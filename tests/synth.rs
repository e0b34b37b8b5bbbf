//! `wick synth`: a folder with random weights is a converted folder like any other.
//!
//! Taking up a killed run, a full disk and the layout are the converter's, and tested there.

use std::fs;
use std::path::Path;

use candle_wick::{FlashFolder, IoOptions, SelectorKind};
use candle_wick_convert::synthetic::{synthesise, Geometry, SyntheticOptions, SYNTHETIC_KEY};
use candle_wick_models::{LoadOptions, LoadedModel};
use serde_json::Value;
use wick_format::{Dtype, Layout};

use crate::support::{all_logits, field, greedy, json, wick};

const IDS: [u32; 5] = [2, 50271, 7, 400, 1];

/// Two layers of OPT 125M.
fn small(out: &Path, dtype: Dtype, seed: u64) {
    let options = SyntheticOptions {
        dtype,
        layout: Layout::Neuron,
        layers: Some(2),
        seed,
    };
    synthesise(Geometry::find("opt-125m").unwrap(), out, &options, &|_| {}).unwrap();
}

fn open(path: &Path) -> FlashFolder {
    FlashFolder::open(path, IoOptions::default()).unwrap()
}

/// Few slots and all of them: the same bytes, and numbers.
#[test]
fn every_dtype_runs_with_every_selector() {
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        let out = tempfile::tempdir().unwrap();
        small(out.path(), dtype, 1);
        let folder = open(out.path());
        assert_eq!(folder.manifest().dtype, dtype);
        for (selector, active) in [
            (SelectorKind::Dense, 1.0..=1.0),
            (SelectorKind::Oracle, 0.28..=0.38),
            (SelectorKind::LowRank, 0.07..=0.13),
        ] {
            let mut reference = None;
            for slots in [600, 3072] {
                let options = LoadOptions {
                    selector: Some(selector),
                    slots_per_layer: Some(slots),
                    ..LoadOptions::default()
                };
                let mut model = LoadedModel::load(folder.clone(), &options).unwrap();
                let logits = all_logits(&mut model, &IDS);
                let all_finite = logits.iter().flatten().all(|logit| logit.is_finite());
                assert!(all_finite, "{dtype} {selector}");
                let selected = model.stats().selected_fraction();
                assert!(active.contains(&selected), "{dtype} {selector}: {selected}");
                model.reset();
                let got = (logits, greedy(&mut model, &IDS, 6));
                let reference = reference.get_or_insert_with(|| got.clone());
                assert!(*reference == got, "{dtype} {selector} {slots} slots");
            }
        }
    }
}

#[test]
fn the_seed_decides_the_bytes() {
    let root = tempfile::tempdir().unwrap();
    let written = |name: &str, seed| {
        let out = root.path().join(name);
        small(&out, Dtype::F16, seed);
        let files = ["resident", "ffn-00001-of-00001", "predictors"];
        let read = |file| fs::read(out.join(format!("{file}.safetensors"))).unwrap();
        (open(&out).manifest().model_hash.clone(), files.map(read))
    };
    let (first, same, other) = (written("a", 7), written("b", 7), written("c", 8));
    assert!(first == same);
    assert_ne!(first.0, other.0);
    for (file, other) in first.1.iter().zip(&other.1) {
        assert!(file != other && file.len() == other.len());
    }
}

#[test]
fn the_command_writes_a_folder_that_the_others_read() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("model");
    let path = out.to_str().unwrap();
    let synth = ["synth", "--like", "opt-125m", "--layers", "2", path];
    let report = json(&synth);
    assert_eq!(
        (&report["layers"], &report["like"], &report["dtype"]),
        (&2.into(), &"opt-125m".into(), &"f16".into())
    );
    let config: Value =
        serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(config[SYNTHETIC_KEY], "opt-125m");

    let inspected = json(&["inspect", path]);
    let bytes = field(&report, "predictor_bytes");
    assert_eq!(field(&inspected, "predictor_bytes"), bytes);
    assert_eq!(inspected["has_tokenizer"], false);
    assert_eq!(inspected["layers"][1]["predictor"]["union_fraction"], 0.24);

    let run = ["run", path, "--ids", "5,6,7,8", "-n", "4"];
    for selector in ["dense", "lowrank"] {
        let at = |memory| {
            let options = ["--selector", selector, "--memory", memory];
            json(&[&run[..], &options].concat())["ids"].clone()
        };
        let plenty = at("100%");
        assert_eq!(plenty.as_array().unwrap().len(), 4);
        assert_eq!(at("90%"), plenty, "{selector}");
    }

    // Again: nothing to do. With other weights: not into this folder.
    let before = fs::metadata(out.join("predictors.safetensors")).unwrap();
    let again = json(&synth);
    assert!(again["notes"][0]
        .as_str()
        .unwrap()
        .contains("complete already"));
    let after = fs::metadata(out.join("predictors.safetensors")).unwrap();
    assert_eq!(before.modified().unwrap(), after.modified().unwrap());
    let other = wick(&[&synth[..], &["--seed", "2"]].concat());
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert_eq!(other.status.code(), Some(1), "{said}");
    assert!(said.contains(path) && said.contains("another"), "{said}");
}

#[test]
fn an_unknown_model_is_refused_with_the_known_ones() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("model");
    let output = wick(&["synth", "--like", "gpt-9", out.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    for geometry in Geometry::all() {
        assert!(said.contains(geometry.name), "{said}");
    }
    assert!(!out.exists());
}
