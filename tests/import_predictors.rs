//! `wick predictor import`: what PowerInfer's and Deja Vu's files select here is what they select there, and what is no
//! predictor for the model is refused.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use candle_wick::{FlashFolder, IoOptions, RecordedTrace, SelectorKind};
use candle_wick_models::record_trace;
use serde::Deserialize;
use serde_json::Value;

use crate::support::{converted, converted_as, fixture, options, text, wick, ConvertArgs};

/// `expected.json` beside a maker's files, by `scripts/import_predictors.py`.
#[derive(Deserialize)]
struct Expected {
    fixture: String,
    ids: Vec<u32>,
    input: String,
    between: String,
    ranks: Vec<u64>,
    /// By layer, then by token.
    selected: Vec<Vec<Vec<u32>>>,
    #[serde(default)]
    convert: ConvertArgs,
}

fn files(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/imported_predictors")
        .join(name)
}

fn import(model: &Path, from: &Path, ids: &str, more: &[&str]) -> Output {
    let words = ["predictor", "import", text(model), text(from), "--ids", ids];
    wick(&[&words[..], more].concat())
}

/// Imports the files of `name` into their fixture; gives the model, what is expected, and the report.
fn imported(name: &str) -> (tempfile::TempDir, Expected, Value) {
    let json = fs::read_to_string(files(name).join("expected.json")).unwrap();
    let expected: Expected = serde_json::from_str(&json).unwrap();
    let model = converted_as(&fixture(&expected.fixture), &expected.convert);
    let ids: Vec<String> = expected.ids.iter().map(u32::to_string).collect();
    let output = import(model.path(), &files(name), &ids.join(","), &["--json"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {said}");
    let report = serde_json::from_slice(&output.stdout).unwrap();
    (model, expected, report)
}

fn selects_the_reference(name: &str, made_by: &str) {
    let (model, expected, report) = imported(name);
    assert_eq!(report["made_by"], made_by);
    assert_eq!(report["input"], expected.input);
    assert_eq!(report["between"], expected.between);
    assert_eq!(report["ranks"], serde_json::json!(expected.ranks));
    let path = model.path().join("selected.trace");
    let load = options(SelectorKind::LowRank, None);
    let mut loaded = candle_wick_models::load(model.path(), &load).unwrap();
    record_trace(&mut loaded, &expected.ids, &path, &|_| {}).unwrap();
    let trace = RecordedTrace::open(&path).unwrap();
    let opened = FlashFolder::open(model.path(), IoOptions::default()).unwrap();
    let metadata = opened.predictors().unwrap().unwrap();
    for (index, expected) in expected.selected.iter().enumerate() {
        let layer = trace.layer(index).unwrap();
        let selected: Vec<Vec<u32>> = layer.iter().map(<[u32]>::to_vec).collect();
        assert_eq!(&selected, expected, "{name}, layer {index}");
        // What was measured is what these sets are.
        let count: usize = expected.iter().map(Vec::len).sum();
        let share = count as f64 / (expected.len() * layer.intermediate_size()) as f64;
        let measured = f64::from(metadata.selected_fraction[index]);
        assert!((measured - share).abs() < 1e-6, "{measured}, not {share}");
        let recall = f64::from(metadata.recall[index]);
        let reported = report["layers"][index]["recall"].as_f64().unwrap();
        assert!((recall - reported).abs() < 1e-6 && recall > 0.0 && recall < 1.0);
    }
    assert!(metadata.windows.is_some());
    let name = metadata.made_by.as_deref().unwrap();
    assert!(name.contains(made_by), "{name}");
    assert_eq!(leftovers(model.path()), [""; 0]);
}

/// Hidden files.
fn leftovers(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().flatten();
    let names = names.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.')).collect()
}

#[test]
fn powerinfer_for_opt_sees_the_residual_and_has_relu_between() {
    selects_the_reference("powerinfer-opt", "PowerInfer");
}

#[test]
fn deja_vu_sees_the_residual_and_is_linear() {
    selects_the_reference("deja-vu-opt", "Deja Vu");
}

#[test]
fn powerinfer_for_falcon_sees_the_layers_input() {
    selects_the_reference("powerinfer-falcon", "PowerInfer");
}

#[test]
fn input_and_threshold_can_be_told() {
    let (model, _, usual) = imported("powerinfer-opt");
    let out = model.path().join("other.safetensors");
    let more = [
        "--input",
        "ffn_input",
        "--threshold",
        "-0.5",
        "--out",
        text(&out),
        "--json",
    ];
    let output = import(model.path(), &files("powerinfer-opt"), "1,2,3,4,5,6", &more);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["input"], &report["path"]),
        (&"ffn_input".into(), &text(&out).into())
    );
    assert_eq!(report["layers"][0]["threshold"], -0.5);
    assert_eq!(usual["layers"][0]["threshold"], 0.125);
    let selected = |report: &Value| report["layers"][1]["selected_fraction"].as_f64().unwrap();
    assert!(selected(&report) > selected(&usual));
}

/// A copy of the files of PowerInfer for OPT, spoilt by `spoil`, is refused with these words, and nothing is written.
fn refused(spoil: impl Fn(&Path), parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(files("powerinfer-opt")).unwrap().flatten() {
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    spoil(folder.path());
    let model = converted(&fixture("opt-pre-ln"));
    let output = import(model.path(), folder.path(), "1,2,3", &[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{parts:?}");
    assert!(
        parts.iter().all(|part| said.contains(part)),
        "{parts:?}: {said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!model.path().join("predictors.safetensors").exists());
    assert_eq!(leftovers(model.path()), [""; 0]);
}

fn put(from: &Path, folder: &Path, name: &str) {
    fs::copy(from, folder.join(name)).unwrap();
}

#[test]
fn other_layers_than_the_models_are_refused() {
    let remove =
        |name: &'static str| move |folder: &Path| fs::remove_file(folder.join(name)).unwrap();
    refused(
        remove("model_1.pt"),
        &["no predictor for layer 1 of the model's 3"],
    );
    let add = |name: &'static str| {
        move |folder: &Path| put(&files("powerinfer-opt/model_0.pt"), folder, name)
    };
    refused(add("model_3.pt"), &["model_3.pt", "layer 3", "has 3"]);
    refused(add("x_layer2.pt"), &["layer 2", "and so is"]);
    refused(add("head.pt"), &["head.pt", "says no layer"]);
    let all = |folder: &Path| {
        for number in 0..3 {
            fs::remove_file(folder.join(format!("model_{number}.pt"))).unwrap();
        }
    };
    refused(all, &["holds no predictors"]);
}

#[test]
fn other_tensors_than_the_layers_are_refused() {
    let replace = |with: PathBuf| move |folder: &Path| put(&with, folder, "model_1.pt");
    let checkpoint = |name: &str| {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/wick-checkpoint/tests/files");
        folder.join(name)
    };
    let width = ["model_1.pt", "`fc1.weight`", "[4, 32]", "[rank, 64]"];
    refused(replace(files("powerinfer-falcon/model_0.pt")), &width);
    let rank = ["model_1.pt", "`fc2.weight`", "[256, 6]", "[256, 5]"];
    refused(replace(files("wrong-rank.pt")), &rank);
    let keys = ["model_1.pt", "embed.weight", "not the two of PowerInfer"];
    refused(replace(checkpoint("zip-module.pt")), &keys);
    let maker = ["model_1.pt", "Deja Vu", "PowerInfer"];
    refused(replace(files("deja-vu-opt/c4_layer1_0.97-0.41.pt")), &maker);
    refused(replace(checkpoint("zip-runs.pt")), &["model_1.pt"]);
    refused(
        |folder| fs::write(folder.join("model_1.pt"), "PK").unwrap(),
        &["model_1.pt"],
    );
}

#[test]
fn numbers_that_are_none_are_refused() {
    let spoil = |folder: &Path| {
        let path = folder.join("model_2.pt");
        let mut bytes = fs::read(&path).unwrap();
        // In the larger matrix, whose elements lie as they are.
        let middle = bytes.len() / 2;
        bytes[middle..middle + 8].fill(0xff);
        fs::write(&path, bytes).unwrap();
    };
    refused(spoil, &["model_2.pt", "`fc2.weight`", "NaN", "finite"]);
    let threshold = |value: &'static str| {
        move |folder: &Path| {
            let config = format!("{{\"sparse_threshold\": {value}}}");
            fs::write(folder.join("config.json"), config).unwrap();
        }
    };
    for value in ["\"high\"", "1e300", "null"] {
        refused(
            threshold(value),
            &["config.json", "sparse_threshold", "a number"],
        );
    }
    refused(threshold(""), &["config.json", "no JSON"]);
}
