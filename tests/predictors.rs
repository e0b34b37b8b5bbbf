//! `wick predictor train` and `eval`: what is learnt is worth it and goes on after a kill, and figures are what they say.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle::{Device, Tensor};
use candle_wick::{FlashFolder, IoOptions, SelectorKind};
use candle_wick_models::record_trace;
use serde_json::Value;

use crate::demo::{assets, demo};
use crate::support::{converted, fixture, json, options, refused, text, wick};

/// A part of the calibration text, so that learning takes seconds.
pub fn short_text(folder: &Path) -> PathBuf {
    let whole = fs::read_to_string(assets().join("calibration.txt")).unwrap();
    let part: String = whole.chars().take(40_000).collect();
    let path = folder.join("text.txt");
    fs::write(&path, part).unwrap();
    path
}

/// Options with which training takes seconds.
const QUICK: [&str; 11] = [
    "--tokens",
    "4000",
    "--rank",
    "12",
    "--last-layers",
    "1",
    "--last-rank",
    "24",
    "--keep-rank",
    "--learning-rate",
    "0.004",
];

pub fn train<'a>(model: &'a Path, texts: &[&'a Path], more: &[&'a str]) -> Vec<&'a str> {
    let mut words = vec!["predictor", "train", text(model), "--text-file"];
    words.extend(texts.iter().map(|path| text(path)));
    words.extend(QUICK);
    words.extend(more);
    words
}

pub fn number(value: &Value, key: &str) -> f64 {
    value[key]
        .as_f64()
        .unwrap_or_else(|| panic!("{key} in {value}"))
}

pub fn mean(layers: &Value, of: impl Fn(&Value) -> f64) -> f64 {
    let layers = layers.as_array().unwrap();
    layers.iter().map(of).sum::<f64>() / layers.len() as f64
}

#[test]
fn a_trained_pair_selects_less_for_the_same_recall() {
    let folder = demo();
    let (short, out) = (
        short_text(folder.path()),
        folder.path().join("trained.safetensors"),
    );
    let before = fs::read(folder.path().join("predictors.safetensors")).unwrap();
    let heldout = assets().join("heldout.txt");
    let more = ["--epochs", "2", "--out", text(&out)];
    let words = train(folder.path(), &[&short, &heldout], &more);
    let report = json(&words);
    let layers = &report["layers"];
    let ranks: Vec<u64> = layers
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| layer["rank"].as_u64().unwrap())
        .collect();
    assert_eq!(ranks, [12, 12, 12, 12, 12, 24]);
    let closed = mean(layers, |layer| {
        number(&layer["closed_form"], "selected_fraction")
    });
    let trained = mean(layers, |layer| {
        number(&layer["trained"][0], "selected_fraction")
    });
    let recall = mean(layers, |layer| number(&layer["trained"][0], "recall"));
    assert!(trained < 0.95 * closed, "{trained} of {closed}");
    assert!((recall - 0.95).abs() < 0.02, "{recall}");
    for layer in layers.as_array().unwrap() {
        let epochs = layer["epochs"].as_u64().unwrap();
        assert!((1..=2).contains(&epochs), "{epochs}");
    }
    // The model's own file is as it was, the new one can be used and says what it is.
    assert_eq!(
        fs::read(folder.path().join("predictors.safetensors")).unwrap(),
        before
    );
    let opened = FlashFolder::open_with(folder.path(), IoOptions::default(), Some(&out)).unwrap();
    let metadata = opened.predictors().unwrap().unwrap();
    assert_eq!(metadata.made_by.as_deref(), Some("trained"));
    assert_eq!(metadata.recall.len(), layers.as_array().unwrap().len());
    let written: Vec<f64> = metadata
        .recall
        .iter()
        .map(|recall| f64::from(*recall))
        .collect();
    let reported = layers
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| number(&layer["trained"][0], "recall"));
    assert!(written
        .iter()
        .zip(reported)
        .all(|(a, b)| (a - b).abs() < 1e-6));
}

/// The bytes of `out` after training, undisturbed.
fn trained_bytes(folder: &Path, short: &Path, out: &Path, more: &[&str]) -> Vec<u8> {
    let more = [&["--epochs", "1", "--out", text(out)], more].concat();
    let words: Vec<String> = train(folder, &[short], &more)
        .iter()
        .map(|word| word.to_string())
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let output = wick(&words);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    fs::read(out).unwrap()
}

#[test]
fn a_killed_training_goes_on_to_the_same_bytes_and_another_seed_to_others() {
    let folder = demo();
    let short = short_text(folder.path());
    let out = |name: &str| folder.path().join(name);
    let undisturbed = trained_bytes(folder.path(), &short, &out("a.safetensors"), &[]);
    assert!(!out(".a.safetensors.training").exists());
    let killed = out("b.safetensors");
    let work = out(".b.safetensors.training");
    let more = ["--epochs", "1", "--out", text(&killed)];
    let words = train(folder.path(), &[&short], &more);
    let mut child = Command::new(env!("CARGO_BIN_EXE_wick"))
        .args(&words)
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let finished = || {
        let entries = fs::read_dir(&work).into_iter().flatten().flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("layer-"))
            .count()
    };
    let started = Instant::now();
    while finished() < 2 && started.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(finished() >= 2 && !killed.exists());
    // A layer that the kill, or somebody else, left broken is learnt again.
    let broken = fs::read_dir(&work)
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let broken = broken
        .into_iter()
        .find(|path| text(path).contains("layer-1-"))
        .unwrap();
    fs::write(&broken, b"broken").unwrap();
    let again = trained_bytes(folder.path(), &short, &killed, &[]);
    assert!(again == undisturbed && !work.exists());
    let other = trained_bytes(
        folder.path(),
        &short,
        &out("c.safetensors"),
        &["--seed", "2"],
    );
    assert!(other != undisturbed);
    let random = trained_bytes(
        folder.path(),
        &short,
        &out("d.safetensors"),
        &["--from-scratch"],
    );
    assert!(random != undisturbed);
}

#[test]
fn thresholds_are_swept_and_the_first_is_written() {
    let folder = demo();
    let (short, out) = (
        short_text(folder.path()),
        folder.path().join("t.safetensors"),
    );
    let thresholds = ["--threshold", "0.5,0.3,0.7"];
    let more = [&thresholds[..], &["--epochs", "1", "--out", text(&out)]].concat();
    let report = json(&train(folder.path(), &[&short], &more));
    let of = |at: usize, key: &str| {
        mean(&report["layers"], |layer| {
            number(&layer["trained"][at], key)
        })
    };
    let selected = [1, 0, 2].map(|at| of(at, "selected_fraction"));
    let recall = [1, 0, 2].map(|at| of(at, "recall"));
    assert!(
        selected[0] > selected[1] && selected[1] > selected[2],
        "{selected:?}"
    );
    assert!(recall[0] > recall[1] && recall[1] > recall[2], "{recall:?}");
    assert_eq!(of(0, "threshold"), 0.0);
    let opened = FlashFolder::open_with(folder.path(), IoOptions::default(), Some(&out)).unwrap();
    assert_eq!(opened.predictors().unwrap().unwrap().thresholds, [0.0; 6]);
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let folder = demo();
    let short = short_text(folder.path());
    let tiny = folder.path().join("tiny.txt");
    fs::write(&tiny, "Too short to learn from.").unwrap();
    let none = folder.path().join("none.txt");
    refused(
        &train(Path::new("demo"), &[&short], &[]),
        &["demo has its predictors already"],
    );
    refused(
        &train(folder.path(), &[&tiny], &[]),
        &["tiny.txt", "tokens", "are needed"],
    );
    refused(&train(folder.path(), &[&none], &[]), &["none.txt"]);
    refused(
        &train(folder.path(), &[&short], &["--out", "/dev/null/x"]),
        &["/dev/null"],
    );
    let dense = converted(&fixture("llama-2-silu"));
    refused(
        &train(dense.path(), &[&short], &[]),
        &["activation silu", "nothing to predict"],
    );
    let no_tokenizer = converted(&fixture("opt-pre-ln"));
    refused(
        &train(no_tokenizer.path(), &[&short], &[]),
        &["no tokenizer.json"],
    );
    for more in [
        ["--threshold", "1.5"],
        ["--learning-rate", "0"],
        ["--target-recall", "0"],
    ] {
        let words = ["predictor", "train", text(folder.path())];
        let words = [&words[..], &["--text-file", text(&short)], &more].concat();
        refused(&words, &["invalid value"]);
    }
    assert!(!folder
        .path()
        .join(".predictors.safetensors.training")
        .exists());
}

/// One layer, counted in the plainest way.
#[derive(Default)]
struct Naive {
    neurons: f64,
    active: f64,
    selected: f64,
    found: f64,
    cached: f64,
    cached_found: f64,
    read: f64,
    mass: f64,
    missed: f64,
}

/// The layers of the demo on `ids`, as `eval` should find them with a window of `window` tokens.
fn naive(folder: &Path, ids: &[u32], window: usize) -> Vec<Naive> {
    let mut model =
        candle_wick_models::load(folder, &options(SelectorKind::LowRank, None)).unwrap();
    let inputs = Arc::new(Mutex::new(vec![Vec::new(); 6]));
    let keep = inputs.clone();
    model.record_ffn_inputs(Some(Box::new(move |layer, rows| {
        keep.lock().unwrap()[layer].extend_from_slice(rows);
    })));
    let path = folder.join("naive.trace");
    record_trace(&mut model, ids, &path, &|_| {}).unwrap();
    let trace = candle_wick::RecordedTrace::open(&path).unwrap();
    let dense = model.dense_weights();
    let layers = model.folder().manifest().layers.iter().enumerate();
    let inputs = inputs.lock().unwrap();
    layers
        .map(|(index, layer)| {
            let (width, hidden) = (layer.intermediate_size, layer.hidden_size);
            let x = Tensor::from_slice(&inputs[index], (ids.len(), hidden), &Device::Cpu).unwrap();
            let weight = dense.get((width, hidden), &layer.up).unwrap();
            let bias = dense.get(width, layer.up_bias.as_ref().unwrap()).unwrap();
            let exact = x
                .matmul(&weight.t().unwrap())
                .unwrap()
                .broadcast_add(&bias)
                .unwrap();
            let mut sums = Naive::default();
            let mut before: VecDeque<Vec<u32>> = VecDeque::new();
            let selections = trace.layer(index).unwrap();
            for (exact, selected) in exact
                .to_vec2::<f32>()
                .unwrap()
                .iter()
                .zip(selections.iter())
            {
                for (neuron, value) in exact.iter().enumerate() {
                    let has = |list: &[u32]| list.contains(&(neuron as u32));
                    let (active, chosen) = (*value > 0.0, has(selected));
                    let was_there = before.iter().any(|list| has(list));
                    let one = |is: bool| f64::from(u8::from(is));
                    sums.neurons += 1.0;
                    sums.active += one(active);
                    sums.selected += one(chosen);
                    sums.found += one(active && chosen);
                    sums.cached += one(chosen || was_there);
                    sums.cached_found += one(active && (chosen || was_there));
                    sums.read += one(chosen && !was_there);
                    sums.mass += f64::from(value.max(0.0));
                    sums.missed += if chosen {
                        0.0
                    } else {
                        f64::from(value.max(0.0))
                    };
                }
                before.push_back(selected.to_vec());
                if before.len() > window {
                    before.pop_front();
                }
            }
            sums
        })
        .collect()
}

#[test]
fn eval_says_what_counting_by_hand_says() {
    let folder = demo();
    let ids: Vec<u32> = (0..60).map(|i| 100 + i * 37 % 3000).collect();
    let listed: Vec<String> = ids.iter().map(u32::to_string).collect();
    let listed = listed.join(",");
    for window in [1, 5] {
        let expected = naive(folder.path(), &ids, window);
        let window = window.to_string();
        let words = [
            "predictor",
            "eval",
            text(folder.path()),
            "--ids",
            &listed,
            "--window",
            &window,
        ];
        let report = json(&words);
        let layers = report["layers"].as_array().unwrap();
        assert_eq!(
            (layers.len(), report["selector"].as_str()),
            (6, Some("lowrank"))
        );
        let mut bytes = 0.0;
        for (got, naive) in layers.iter().zip(&expected) {
            let near = |key: &str, expected: f64| {
                let got = number(got, key);
                assert!(
                    (got - expected).abs() < 1e-4,
                    "{key}: {got}, not {expected}"
                );
            };
            near("active", naive.active / naive.neurons);
            near("selected", naive.selected / naive.neurons);
            near("recall", naive.found / naive.active);
            let inactive = naive.neurons - naive.active;
            near("false_positives", (naive.selected - naive.found) / inactive);
            near("mass_missed", naive.missed / naive.mass);
            near("cached", naive.cached / naive.neurons);
            near("cached_recall", naive.cached_found / naive.active);
            near("read", naive.read / naive.neurons);
            bytes += naive.read / 60.0 * 1024.0; // a row and a column of 256 halves
        }
        let total = number(&report, "bytes_per_token");
        assert!((total / bytes - 1.0).abs() < 1e-6, "{total}, not {bytes}");
        let bins = report["histogram"].as_array().unwrap();
        let count = |key: &str| bins.iter().map(|bin| number(bin, key)).sum::<f64>();
        let sum = |of: fn(&Naive) -> f64| expected.iter().map(of).sum::<f64>();
        assert!((count("active") - sum(|layer| layer.active)).abs() < 3.0);
        assert!((count("missed") - sum(|layer| layer.active - layer.found)).abs() < 3.0);
    }
}

#[test]
fn eval_prints_a_line_for_each_layer_and_draws() {
    let folder = demo();
    let (heldout, pictures) = (assets().join("heldout.txt"), folder.path().join("pictures"));
    let words = [
        "predictor",
        "eval",
        text(folder.path()),
        "--text-file",
        text(&heldout),
        "--tokens",
        "300",
    ];
    let output = wick(&[&words[..], &["--plot", text(&pictures)]].concat());
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && said.lines().count() == 1 + 6 + 1 + 2,
        "{said}"
    );
    let svg = fs::read_to_string(pictures.join("layers.svg")).unwrap();
    // Three lines over six layers, then twice two, and three names.
    assert_eq!(svg.matches("<circle").count(), 3 * 6 + 2 * 2 * 6 + 3);
    for name in ["layers.png", "pre-activations.svg", "pre-activations.png"] {
        assert!(pictures.join(name).exists(), "{name}");
    }
}

/// The oracle misses nothing, in gated layers with a threshold too.
#[test]
fn eval_of_the_oracle_finds_everything() {
    for name in ["sparsellama-fatrelu", "persimmon"] {
        let folder = converted(&fixture(name));
        let words = [
            "predictor",
            "eval",
            text(folder.path()),
            "--selector",
            "oracle",
            "--ids",
            "5,9,41,77,12,60",
        ];
        let report = json(&words);
        let all = &report["all"];
        assert!(
            number(all, "recall") > 0.999 && number(all, "false_positives") < 0.001,
            "{all}"
        );
        assert!(
            number(all, "mass_missed") < 1e-6 && number(all, "active") > 0.05,
            "{all}"
        );
        assert_eq!(number(all, "selected") > 0.0, number(all, "read") > 0.0);
    }
}

#[test]
fn what_cannot_be_judged_is_refused() {
    let folder = demo();
    let eval = |more: &[&str], parts: &[&str]| {
        let words = [&["predictor", "eval", text(folder.path())], more].concat();
        refused(&words, parts);
    };
    eval(&[], &["no text"]);
    eval(&["--ids", ""], &["0 tokens"]);
    eval(&["--ids", "1,2,99999"], &["99999"]);
    eval(
        &["--ids", "1,2", "--selector", "dense"],
        &["every token has every neuron"],
    );
    let dense = converted(&fixture("llama-2-silu"));
    refused(
        &["predictor", "eval", text(dense.path()), "--ids", "1,2"],
        &["silu", "never exactly zero"],
    );
}
