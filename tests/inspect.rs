//! `wick inspect`: a folder in figures, also where its predictors are of no use.

use std::path::Path;

use serde_json::Value;

use crate::demo::demo;
use crate::support::{field, json, refused, text, wick};

/// Swaps words of the same length in a file's header.
fn swap(path: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(path).unwrap();
    let mut count = 0;
    for at in 0..bytes.len() - from.len() {
        if bytes[at..].starts_with(from.as_bytes()) {
            bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
            count += 1;
        }
    }
    assert!(count > 0, "{from}");
    std::fs::write(path, bytes).unwrap();
}

/// What does not depend on predictors.
fn rest(inspection: &Value) -> Vec<&Value> {
    let mut rest: Vec<&Value> = Vec::new();
    for name in [
        "model_hash",
        "dense_weight_bytes",
        "ffn_bytes",
        "resident_bytes",
    ] {
        rest.push(field(inspection, name));
    }
    let layers = inspection["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 6);
    rest.extend(layers.iter().map(|layer| field(layer, "record_bytes")));
    let files = inspection["files"].as_array().unwrap();
    rest.extend(files.iter().map(|file| field(file, "name")));
    rest
}

#[test]
fn predictors_that_are_of_no_use_do_not_hide_the_rest() {
    let folder = demo();
    let path = folder.path().join("predictors.safetensors");
    let good = std::fs::read(&path).unwrap();
    let whole = json(&["inspect", text(folder.path())]);
    assert!(field(&whole, "predictors_error").is_null());
    assert_eq!(whole["predictors"]["form"], "lowrank");
    let hash = whole["model_hash"].as_str().unwrap();
    let cut: fn(&Path, &str) = |path, _| std::fs::write(path, "no header").unwrap();
    let other: fn(&Path, &str) = |path, hash| swap(path, hash, "0123456789abcdef");
    let lacking: fn(&Path, &str) =
        |path, _| swap(path, "predictor.up.weight", "predictor.up.weighs");
    for (damage, reason) in [
        (cut, "header"),
        (other, "made for model 0123456789abcdef"),
        (lacking, "up.weight is missing"),
    ] {
        damage(&path, hash);
        let found = json(&["inspect", text(folder.path())]);
        assert_eq!(rest(&found), rest(&whole), "{reason}");
        assert!(field(&found, "predictors").is_null());
        let bytes = std::fs::metadata(&path).unwrap().len();
        assert_eq!(found["predictor_bytes"], bytes);
        let said = wick(&["inspect", text(folder.path())]).stdout;
        let said = String::from_utf8(said).unwrap();
        for part in ["unusable: ", "predictors.safetensors", reason] {
            assert!(said.contains(part), "{part}: {said}");
            let error = found["predictors_error"].as_str().unwrap();
            assert!(part == "unusable: " || error.contains(part), "{error}");
        }
        assert!(said.lines().count() > 20, "{said}");
        // Those that were asked for by name have to be usable to this extent.
        if reason != "up.weight is missing" {
            let words = ["inspect", text(folder.path()), "--predictors", text(&path)];
            refused(&words, &[reason]);
        }
        std::fs::write(&path, &good).unwrap();
    }
}
