//! `wick trace` and `wick window`: what is recorded is what tokens have, and figures come of it.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use candle::{Device, Tensor};
use candle_wick::{RecordedTrace, SelectorKind};
use candle_wick_convert::synthetic::{synthesise, Geometry, SyntheticOptions};
use candle_wick_models::{record_trace, LoadOptions};
use serde_json::Value;
use wick_format::{Dtype, Layout};

use crate::demo::demo;
use crate::support::{json, options, refused, text, wick};

/// The neurons of each token, by layer.
fn all_layers(path: &Path) -> Vec<Vec<Vec<u32>>> {
    let trace = RecordedTrace::open(path).unwrap();
    let layers = 0..trace.intermediate_sizes().len();
    let layer = |index| {
        trace
            .layer(index)
            .unwrap()
            .iter()
            .map(<[u32]>::to_vec)
            .collect()
    };
    layers.map(layer).collect()
}

/// The oracle's neurons are those whose pre-activation, computed from the dense matrix, is positive.
#[test]
fn the_oracle_records_the_truly_active_neurons() {
    let folder = demo();
    let path = folder.path().join("a.trace");
    let ids: Vec<u32> = (0..20).map(|i| 100 + i * 31).collect();
    let mut model =
        candle_wick_models::load(folder.path(), &options(SelectorKind::Oracle, None)).unwrap();
    let inputs = Arc::new(Mutex::new(Vec::new()));
    let keep = inputs.clone();
    model.record_ffn_inputs(Some(Box::new(move |layer, rows| {
        keep.lock().unwrap().push((layer, rows.to_vec()));
    })));
    record_trace(&mut model, &ids, &path, &|_| {}).unwrap();
    let layers = all_layers(&path);
    let dense = model.dense_weights();
    let mut active_count = 0;
    for (index, rows) in inputs.lock().unwrap().iter() {
        let layer = &model.folder().manifest().layers[*index];
        let (width, hidden) = (layer.intermediate_size, layer.hidden_size);
        let x = Tensor::from_slice(rows, (ids.len(), hidden), &Device::Cpu).unwrap();
        let weight = dense.get((width, hidden), &layer.up).unwrap();
        let bias = dense.get(width, layer.up_bias.as_ref().unwrap()).unwrap();
        let scores = x
            .matmul(&weight.t().unwrap())
            .unwrap()
            .broadcast_add(&bias)
            .unwrap();
        for (scores, neurons) in scores.to_vec2::<f32>().unwrap().iter().zip(&layers[*index]) {
            for (neuron, score) in scores.iter().enumerate() {
                let is_recorded = neurons.binary_search(&(neuron as u32)).is_ok();
                assert!(
                    is_recorded == (*score > 0.0) || score.abs() < 1e-4,
                    "{neuron}: {score}"
                );
                active_count += usize::from(is_recorded);
            }
        }
    }
    assert!(active_count > 1000, "{active_count}");
}

/// Sequences of the context, and prompts in one piece or token by token.
#[test]
fn what_is_recorded_does_not_depend_on_how_tokens_are_grouped() {
    let folder = demo();
    let ids: Vec<u32> = (0..70).map(|i| 100 + i * 31).collect();
    let record = |name: &str, ctx: usize, ids: &[u32]| {
        let options = LoadOptions {
            ctx: Some(ctx),
            ..options(SelectorKind::LowRank, None)
        };
        let mut model = candle_wick_models::load(folder.path(), &options).unwrap();
        let path = folder.path().join(name);
        record_trace(&mut model, ids, &path, &|_| {}).unwrap();
        assert_eq!(
            RecordedTrace::open(&path)
                .unwrap()
                .metadata()
                .sequence_tokens,
            ctx
        );
        all_layers(&path)
    };
    let whole = record("whole", 32, &ids);
    // The last sequence alone; one token, which has none before it.
    let last = record("last", 32, &ids[64..]);
    let first = record("first", 1, &ids[..33]);
    for (whole, (last, first)) in whole.iter().zip(last.iter().zip(&first)) {
        assert_eq!(whole.len(), 70);
        assert_eq!(whole[64..], last[..]);
        assert_eq!((&whole[0], &whole[32]), (&first[0], &first[32]));
        assert_ne!(whole[1], first[1]);
    }
}

#[test]
fn a_text_is_recorded_and_figures_come_of_it() {
    let folder = demo();
    let model = text(folder.path());
    let heldout = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/opt-9m/heldout.txt");
    let out = folder.path().join("a.trace");
    let trace = ["trace", model, text(&out)];
    let from_text = [
        &trace[..],
        &["--text-file", text(&heldout), "--tokens", "300"],
    ]
    .concat();
    let report = json(&from_text);
    assert_eq!(
        (&report["tokens"], &report["layers"]),
        (&300.into(), &6.into())
    );
    assert_eq!(
        (&report["selector"], &report["is_replayed"]),
        (&"lowrank".into(), &false.into())
    );
    assert_eq!(report["bytes"], std::fs::metadata(&out).unwrap().len());

    let figures = json(&[
        "window",
        text(&out),
        "--resident",
        "25%,50%",
        "--window",
        "5,2",
    ]);
    let near = |a: &Value, b: &Value| {
        let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
        assert!((a - b).abs() < 1e-9, "{a} {b}");
    };
    near(&figures["selected"], &report["selected"]);
    let windows = figures["windows"].as_array().unwrap();
    assert_eq!(windows.len(), 32);
    near(&windows[0]["union"], &figures["selected"]);
    let number = |value: &Value| value.as_f64().unwrap();
    for pair in windows.windows(2) {
        assert!(number(&pair[0]["union"]) < number(&pair[1]["union"]));
        assert!(number(&pair[0]["fresh"]) > number(&pair[1]["fresh"]));
    }
    for residency in figures["residencies"].as_array().unwrap() {
        let rules = residency["rules"].as_array().unwrap();
        let names: Vec<&str> = rules
            .iter()
            .map(|rule| rule["rule"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["lru", "lfu", "window 5", "window 2", "belady"]);
        let bound = number(&rules[4]["missed"]);
        assert!(
            rules.iter().all(|rule| number(&rule["missed"]) >= bound),
            "{rules:?}"
        );
    }
    let said = String::from_utf8(wick(&["window", text(&out)]).stdout).unwrap();
    for part in ["opt lowrank, 300 tokens", "union", "belady", "75.0 %"] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn random_weights_replay_their_made_up_history() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    let synthetic = SyntheticOptions {
        dtype: Dtype::F16,
        layout: Layout::Neuron,
        layers: Some(2),
        seed: 1,
    };
    synthesise(
        Geometry::find("opt-125m").unwrap(),
        &model,
        &synthetic,
        &|_| {},
    )
    .unwrap();
    let out = folder.path().join("a.trace");
    let report = json(&["trace", text(&model), text(&out), "--tokens", "150"]);
    assert_eq!(
        (&report["is_replayed"], &report["tokens"]),
        (&true.into(), &150.into())
    );
    let figures = json(&["window", text(&out)]);
    // The paper's figures for OPT: a tenth selected, 24 % in five tokens, 2.4 % new.
    for (place, of, expected) in [(0, "union", 0.10), (4, "union", 0.24), (4, "fresh", 0.025)] {
        let got = figures["windows"][place][of].as_f64().unwrap();
        assert!((got / expected - 1.0).abs() < 0.1, "{of} {place}: {got}");
    }
    let oracle = json(&[
        "trace",
        text(&model),
        text(&out),
        "--tokens",
        "9",
        "--selector",
        "oracle",
    ]);
    assert_eq!(oracle["is_replayed"], false);
}

#[test]
fn what_cannot_be_recorded_or_shown_is_said() {
    let folder = demo();
    let (model, out) = (text(folder.path()), folder.path().join("a.trace"));
    let trace = ["trace", model, text(&out)];
    let with = |words: &[&'static str]| [&trace[..], words].concat();
    refused(&trace, &["--text-file FILE"]);
    refused(
        &with(&["--ids", "1,2", "--selector", "dense"]),
        &["dense", "oracle, lowrank or gate"],
    );
    refused(&with(&["--ids", ""]), &["0 tokens"]);
    refused(
        &with(&["--ids", "1", "--text-file", "x"]),
        &["cannot be used with"],
    );
    refused(&with(&["--text", "/no/such"]), &["/no/such"]);
    refused(
        &["trace", model, "/no/such/a.trace", "--ids", "1"],
        &["/no/such/a.trace"],
    );
    assert!(!out.exists());
    json(&with(&["--ids", "5"]));
    refused(
        &["window", text(&out)],
        &["a.trace", "1 tokens", "at least 2"],
    );
    refused(&["window", "/no/such"], &["/no/such"]);
    let config = folder.path().join("config.json");
    refused(&["window", text(&config)], &["config.json", "header"]);
    let resident = folder.path().join("resident.safetensors");
    refused(
        &["window", text(&resident)],
        &["resident.safetensors", "not a recorded trace"],
    );
}

/// Hours of work must not end in the place of a model's file, and must not be for nothing.
#[test]
fn a_trace_takes_the_place_of_an_earlier_trace_and_of_nothing_else() {
    let folder = demo();
    let model = text(folder.path()).to_owned();
    let place = tempfile::tempdir().unwrap();
    let record = |out: &Path| {
        let out = text(out).to_owned();
        wick(&["trace", &model, &out, "--ids", "5,6,7"])
    };
    let manifest = folder.path().join("wick.json");
    let words = place.path().join("words.txt");
    std::fs::write(&words, "words").unwrap();
    for taken in [manifest.as_path(), &words, place.path()] {
        let before = std::fs::read(taken).ok();
        let output = record(taken);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && said.contains("something else than a trace"),
            "{said}"
        );
        assert_eq!(std::fs::read(taken).ok(), before);
    }
    let out = place.path().join("a.trace");
    assert!(record(&out).status.success());
    let first = std::fs::read(&out).unwrap();
    assert!(record(&out).status.success());
    assert_eq!(std::fs::read(&out).unwrap(), first);
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 2);
}

/// Opening a pipe for reading would wait for a writer.
#[cfg(unix)]
#[test]
fn a_pipe_is_no_trace() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    refused(&["window", text(&pipe)], &["pipe", "not a plain file"]);
    refused(&["friends", text(&pipe)], &["pipe", "not a plain file"]);
}
