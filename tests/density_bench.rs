//! `wick bench density` and `wick eval` with selectors that have a density, on the small real model.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::demo::assets;
use crate::support::{json, refused, text, wick};

/// The small model with records of neurons and of columns.
fn both_layouts(folder: &Path) -> String {
    let out = folder.join("model.wick");
    let source = assets();
    let converted = wick(&[
        "convert",
        text(&source),
        text(&out),
        "--layout",
        "both",
        "-q",
    ]);
    assert!(converted.status.success(), "{converted:?}");
    text(&out).to_owned()
}

fn point<'a>(frontier: &'a Value, name: &str, memory: &str) -> &'a Value {
    let points = frontier["points"].as_array().unwrap();
    let mut found = points.iter().filter(|point| {
        point["name"] == name && point["memory"].as_str().unwrap().contains(memory)
    });
    found
        .next()
        .unwrap_or_else(|| panic!("{name} {memory}: {frontier}"))
}

fn number(point: &Value, key: &str) -> f64 {
    point[key]
        .as_f64()
        .unwrap_or_else(|| panic!("{key}: {point}"))
}

#[test]
fn densities_are_set_beside_dense() {
    let folder = tempfile::tempdir().unwrap();
    let model = both_layouts(folder.path());
    let held_out = assets().join("heldout.txt");
    let pictures = folder.path().join("pictures");
    let flags = "--ctx 32 --blocks 2 --tokens 8 --warmup 4 --memory 70%,100% --density 1,0.6 --selectors dip,dip-ca,prune-glu";
    let mut words = vec!["bench", "density", &model, "--text-file", text(&held_out)];
    words.extend(flags.split(' ').chain(["--out", text(&pictures)]));
    let frontier = json(&words);
    for memory in ["70", "100"] {
        let of = |name: &str| point(&frontier, name, memory);
        let dense = number(of("dense"), "perplexity");
        for name in ["dip 1", "dip-ca 1, gamma 0.2", "prune-glu 1"] {
            let same = number(of(name), "perplexity");
            assert!((same / dense - 1.0).abs() < 1e-4, "{name} {same} {dense}");
            let share = number(of(name), "multiply_adds");
            assert!((share - 1.0).abs() < 1e-9, "{name} {share}");
        }
        for name in ["dip 0.6", "dip-ca 0.6, gamma 0.2", "prune-glu 0.6"] {
            let share = number(of(name), "multiply_adds");
            assert!((share - 0.6).abs() < 0.01, "{name} {share}");
        }
        assert!(of("prune-glu 0.6")["decoded"].is_null());
    }
    for name in ["dip 0.6", "prune-glu 0.6"] {
        let of = |memory| number(point(&frontier, name, memory), "perplexity");
        assert_eq!(of("70"), of("100"), "{name}");
    }
    let decoded = |memory| &point(&frontier, "dip 0.6", memory)["decoded"];
    assert!(number(decoded("70"), "bytes") > 0.0);
    assert_eq!(number(decoded("100"), "bytes"), 0.0);
    let [max, sum] = ["max", "sum"].map(|key| number(&decoded("100")["simulated"], key));
    assert!(
        max > 0.0 && max == sum,
        "nothing comes from flash: {max} {sum}"
    );
    check_best(&frontier);
    let pictures: Vec<String> = fs::read_dir(pictures)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(pictures.len(), 2, "{pictures:?}");
}

/// The fastest of those that lose little is named, and nothing without times.
fn check_best(frontier: &Value) {
    let speed = |point: &Value| number(&point["decoded"], "tokens_per_s");
    let points = frontier["points"].as_array().unwrap().iter();
    let good = points.filter(|point| number(point, "loss") <= 0.01 && !point["decoded"].is_null());
    let fastest = good.max_by(|a, b| speed(a).total_cmp(&speed(b))).unwrap();
    let [name, memory] = ["name", "memory"].map(|key| fastest[key].as_str().unwrap());
    assert_eq!(
        frontier["best"].as_str(),
        Some(&*format!("{name}, {memory}"))
    );
}

#[test]
fn what_cannot_be_measured_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let model = both_layouts(folder.path());
    let held_out = assets().join("heldout.txt");
    let bench = ["bench", "density", &model];
    refused(&bench, &["--text-file FILE"]);
    let with_text = [&bench[..], &["--text-file", text(&held_out)]].concat();
    let long = [&with_text[..], &["--ctx", "16", "--tokens", "20"]].concat();
    refused(&long, &["84 tokens to decode", "context of 16"]);
    let small = [&with_text[..], &["--memory", "1KiB"]].concat();
    refused(&small, &["left out", "nothing of this can be measured"]);
    let eval = [
        "eval",
        "ppl",
        &model,
        "--text-file",
        text(&held_out),
        "--ctx",
        "16",
        "--blocks",
        "1",
    ];
    let kept = folder.path().join("results.jsonl");
    let eval = [&eval[..], &["--results", text(&kept), "--selector"]].concat();
    json(&[&eval[..], &["dip", "--density", "0.5"]].concat());
    json(&[&eval[..], &["dip", "--density", "50%"]].concat());
    refused(
        &[&eval[..], &["dip", "--density", "0.6"]].concat(),
        &[text(&kept)],
    );
    refused(
        &[&eval[..], &["cats", "--density", "0.9"]].concat(),
        &["thresholds"],
    );
}
