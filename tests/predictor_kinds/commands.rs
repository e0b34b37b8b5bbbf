//! The commands that make predictors of other kinds, and those that are told to use them.

use std::path::Path;

use candle_wick::PredictorForm;
use serde_json::Value;

use super::file::metadata_of;
use crate::demo::{assets, demo};
use crate::support::{field, json, refused, text, wick};

fn mean(report: &Value, key: &str) -> f64 {
    let layers = report["layers"].as_array().unwrap();
    let values = layers.iter().map(|layer| layer[key].as_f64().unwrap());
    values.sum::<f64>() / layers.len() as f64
}

/// What a file says and what the model is told about it.
fn check_use(folder: &Path, file: &Path, selector: &str, bits: u64, made_by: &str) {
    let (folder, file) = (text(folder), text(file));
    let flags = ["--predictors", file];
    let plan = json(&[&["plan", folder][..], &flags].concat());
    assert_eq!(plan["selector"], selector);
    let used = &plan["predictors"];
    assert_eq!(used["form"], selector);
    assert_eq!(used["bits"], bits);
    assert_eq!(used["input"], "ffn_input");
    let said = used["made_by"].as_str().unwrap();
    assert!(said.contains(made_by), "{said}");
    let lines = plan["lines"].as_array().unwrap();
    let line = lines
        .iter()
        .find(|line| line["label"] == "predictors")
        .unwrap();
    assert_eq!(field(line, "bytes"), field(used, "bytes"));
    let inspection = json(&[&["inspect", folder][..], &flags].concat());
    assert_eq!(&inspection["predictors"], used);
    for command in ["plan", "inspect"] {
        let said = wick(&[&[command, folder][..], &flags].concat()).stdout;
        let said = String::from_utf8(said).unwrap();
        let wanted = format!("{selector}, {bits} bits, of ffn_input");
        assert!(said.contains(&wanted), "{said}");
    }
    let ids = ["--ids", "1765,352,260,2272"];
    json(&[&["score", folder][..], &flags, &ids].concat());
    let other = if selector == "gate" {
        "lowrank"
    } else {
        "gate"
    };
    let words = [&["score", folder, "--selector", other][..], &flags, &ids].concat();
    refused(&words, &[other, selector, file]);
}

/// On the small model: the more bits, the fewer neurons for the same recall; fewer than half of them, and no folder is
/// touched.
#[test]
fn gates_are_made_and_used() {
    let folder = demo();
    let out = tempfile::tempdir().unwrap();
    let own = std::fs::read(folder.path().join("predictors.safetensors")).unwrap();
    let calibration = assets().join("heldout.txt");
    let mut selected = Vec::new();
    for bits in ["4", "2", "1"] {
        let file = out.path().join(format!("gate-{bits}.safetensors"));
        let words = [
            "predictor",
            "gate",
            text(folder.path()),
            "--text-file",
            text(&calibration),
            "--bits",
            bits,
            "--tokens",
            "8192",
            "--out",
            text(&file),
        ];
        let report = json(&words);
        assert_eq!(report["bits"].to_string(), bits);
        assert_eq!(report["bytes"], std::fs::metadata(&file).unwrap().len());
        let recall = mean(&report, "recall");
        assert!((0.94..1.0).contains(&recall), "{bits} bits: {recall}");
        selected.push(mean(&report, "selected_fraction"));
        let made_by = format!("quantised to {bits} bits");
        check_use(
            folder.path(),
            &file,
            "gate",
            bits.parse().unwrap(),
            &made_by,
        );
    }
    assert!(
        selected[0] < selected[1] && selected[1] < selected[2],
        "{selected:?}"
    );
    assert!(selected[2] < 0.5, "{selected:?}");
    let after = std::fs::read(folder.path().join("predictors.safetensors")).unwrap();
    assert!(own == after, "the folder's own predictors were touched");
    // Nothing is left beside what was asked for.
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 3);
}

#[test]
fn low_rank_pairs_are_quantised_and_used() {
    let folder = demo();
    let out = tempfile::tempdir().unwrap();
    let heldout = assets().join("heldout.txt");
    let (halves, file) = (
        out.path().join("halves.safetensors"),
        out.path().join("pair.safetensors"),
    );
    let words = |command, out| {
        let text_file = ["--text-file", text(&heldout), "--tokens", "8192"];
        let model = ["predictor", command, text(folder.path())];
        [&model[..], &text_file, &["--out", out]].concat()
    };
    let fitted = json(&[&words("fit", text(&halves))[..], &["--rank", "32"]].concat());
    let quantize = words("quantize", text(&file));
    let report = json(&[&quantize[..], &["--predictors", text(&halves)]].concat());
    let dram_bytes = |at: usize| report["dram_bytes"][at].as_f64().unwrap();
    let share = dram_bytes(1) / dram_bytes(0);
    assert!((0.45..0.7).contains(&share), "{share}");
    let recall = mean(&report, "recall");
    assert!((0.94..1.0).contains(&recall), "{recall}");
    // What half a level costs is hardly anything.
    let [before, after] = [&fitted, &report].map(|made| mean(made, "selected_fraction"));
    assert!((after - before).abs() < 0.005, "{before}, {after}");
    check_use(folder.path(), &file, "lowrank", 8, "quantised to 8 bits");
    assert_eq!(metadata_of(&file)["form"], PredictorForm::LowRank.name());
    // Once is enough: neither those, nor the ones that the small model comes with.
    refused(
        &[&quantize[..], &["--predictors", text(&file)]].concat(),
        &["8 bits already", "pair.safetensors"],
    );
    refused(&quantize, &["8 bits already", "predictors.safetensors"]);
}

#[test]
fn what_cannot_be_made_is_refused_in_a_sentence() {
    let folder = demo();
    let heldout = assets().join("heldout.txt");
    let gate = [
        "predictor",
        "gate",
        text(folder.path()),
        "--text-file",
        text(&heldout),
    ];
    refused(&[&gate[..], &["--bits", "3"]].concat(), &["4, 2 or 1"]);
    let nowhere = folder.path().join("tokenizer.json/gate.safetensors");
    refused(
        &[&gate[..], &["--tokens", "5120", "--out", text(&nowhere)]].concat(),
        &["tokenizer.json"],
    );
    refused(
        &["predictor", "gate", "demo", "--text-file", text(&heldout)],
        &["demo"],
    );
    refused(
        &[
            "predictor",
            "quantize",
            "demo",
            "--text-file",
            text(&heldout),
        ],
        &["demo"],
    );
    std::fs::remove_file(folder.path().join("predictors.safetensors")).unwrap();
    let quantize = [
        "predictor",
        "quantize",
        text(folder.path()),
        "--text-file",
        text(&heldout),
    ];
    refused(&quantize, &["no predictors"]);
    let missing = folder.path().join("none.safetensors");
    refused(
        &[&quantize[..], &["--predictors", text(&missing)]].concat(),
        &["none.safetensors"],
    );
}

/// A model's file or somebody's text is no place for predictors, and that is told before the work.
#[test]
fn predictors_take_the_place_of_predictors_and_of_nothing_else() {
    let folder = demo();
    let place = tempfile::tempdir().unwrap();
    let words = place.path().join("words.txt");
    std::fs::write(&words, "words").unwrap();
    let (manifest, nowhere) = (folder.path().join("wick.json"), place.path().join("no/p"));
    let calibration = assets().join("calibration.txt");
    let before = std::fs::read(&manifest).unwrap();
    for command in ["fit", "gate", "quantize", "train"] {
        let with = |out: &Path, reason: &str| {
            let model = text(folder.path());
            let base = [
                "predictor",
                command,
                model,
                "--text-file",
                text(&calibration),
            ];
            refused(&[&base[..], &["--out", text(out)]].concat(), &[reason]);
        };
        with(&manifest, "holds no predictors");
        with(&words, "holds no predictors");
        with(place.path(), "holds no predictors");
        with(&nowhere, "no folder");
    }
    assert_eq!(std::fs::read(&manifest).unwrap(), before);
    assert_eq!(std::fs::read_to_string(&words).unwrap(), "words");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
}
