//! `config.json` with numbers that cannot be, before a conversion and after it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{json, Value};
use tempfile::TempDir;

use super::convert::Place;
use super::{complete_folder, converted, edit_json, fixture, refused, replace_listed, text};

const LLAMA_SIZES: [&str; 8] = [
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
];
const OPT_SIZES: [&str; 6] = [
    "num_hidden_layers",
    "hidden_size",
    "ffn_dim",
    "vocab_size",
    "num_attention_heads",
    "max_position_embeddings",
];

const PHI_SIZES: [&str; 7] = [
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "max_position_embeddings",
    "num_key_value_heads",
];

/// Values that no size may have.
fn absurd() -> [Value; 8] {
    let large = 1_000_000_000_000u64;
    [
        json!(large),
        json!(u64::MAX),
        json!(1u64 << 63),
        json!(0),
        json!(-1),
        json!("64"),
        json!(1.5),
        json!([64]),
    ]
}

/// Values of the Llama's other keys.
fn other_llama_values() -> Vec<(&'static str, Value)> {
    vec![
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(-1e-5)),
        ("rms_norm_eps", json!("small")),
        ("rope_theta", json!(0)),
        ("rope_theta", json!(-10000.0)),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})),
        ("rope_scaling", json!({"rope_type": "llama3"})),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 0})),
        ("rope_scaling", json!({"type": "longrope", "factor": 4.0})),
        ("rope_scaling", json!({"type": "dynamic"})),
        ("rope_scaling", json!(7)),
        ("rope_parameters", json!({"rope_theta": 0})),
        ("rope_parameters", json!({"rope_theta": 1e-300})),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_type": "default"}}),
        ),
        ("head_dim", json!(3)),
        ("hidden_act", json!("geglu")),
        ("hidden_act", json!("fatrelu")),
        ("hidden_act", json!(7)),
        ("model_type", json!("gpt2")),
        ("model_type", json!(null)),
        ("tie_word_embeddings", json!("yes")),
    ]
}

/// Values of Phi's and Persimmon's other keys.
fn other_partly_rotary_values() -> Vec<(&'static str, Value)> {
    vec![
        ("layer_norm_eps", json!(0)),
        ("layer_norm_eps", json!("small")),
        ("rope_theta", json!(-1)),
        ("partial_rotary_factor", json!(0)),
        ("partial_rotary_factor", json!(-0.5)),
        ("partial_rotary_factor", json!(1.5)),
        ("partial_rotary_factor", json!(1e300)),
        ("partial_rotary_factor", json!(0.07)),
        ("partial_rotary_factor", json!("half")),
        ("rope_scaling", json!({"type": "longrope", "factor": 4.0})),
        ("rope_parameters", json!({"partial_rotary_factor": 3})),
        ("rope_parameters", json!({"rope_theta": 0})),
        ("qk_layernorm", json!("yes")),
        ("tie_word_embeddings", json!(1)),
        ("hidden_act", json!("swosh")),
    ]
}

fn cases() -> Vec<(&'static str, &'static str, Value)> {
    let mut cases = Vec::new();
    for (name, keys) in [
        ("llama-2-silu", &LLAMA_SIZES[..]),
        ("opt-pre-ln", &OPT_SIZES),
        ("phi-2", &PHI_SIZES),
        ("persimmon", &PHI_SIZES[..6]),
    ] {
        for key in keys {
            cases.extend(absurd().map(|value| (name, *key, value)));
        }
    }
    cases.extend(
        other_llama_values()
            .into_iter()
            .map(|(key, value)| ("llama-2-silu", key, value)),
    );
    for name in ["phi-2", "persimmon"] {
        let values = other_partly_rotary_values();
        cases.extend(values.into_iter().map(|(key, value)| (name, key, value)));
    }
    for (key, value) in [
        ("do_layer_norm_before", json!("no")),
        ("word_embed_proj_dim", json!(32)),
        ("word_embed_proj_dim", json!(0)),
        ("word_embed_proj_dim", json!(1u64 << 63)),
        ("_remove_final_layer_norm", json!(1)),
        ("layer_norm_elementwise_affine", json!("no")),
        ("activation_function", json!("geglu")),
        ("activation_function", json!("fatrelu")),
    ] {
        cases.push(("opt-pre-ln", key, value));
    }
    for name in ["mistral-sliding-window", "qwen2-sliding-window"] {
        cases.extend(absurd().map(|value| (name, "sliding_window", value)));
        for types in [
            json!([]),
            json!(["full_attention"]),
            json!(["full_attention", "chunked_attention"]),
        ] {
            cases.push((name, "layer_types", types));
        }
    }
    cases
}

#[test]
fn what_cannot_be_run_is_not_converted() {
    for (name, key, value) in cases() {
        let place = Place::of(name);
        edit_json(&place.source.join("config.json"), |config| {
            config[key] = value
        });
        place.refuses(&[]);
    }
    for garbage in ["", "{", "[]", "7", "{}"] {
        let place = Place::of("opt-pre-ln");
        fs::write(place.source.join("config.json"), garbage).unwrap();
        place.refuses(&["config.json"]);
    }
}

fn with_config(folder: &Path, original: &Value, key: &str, value: &Value) {
    let mut config = original.clone();
    config[key] = value.clone();
    replace_listed(folder, "config.json", config.to_string().as_bytes());
}

fn converted_with_config(name: &str) -> (TempDir, Value) {
    let folder = converted(&fixture(name));
    let config = fs::read(folder.path().join("config.json")).unwrap();
    (folder, serde_json::from_slice(&config).unwrap())
}

#[test]
fn what_cannot_be_run_after_the_conversion() {
    let cases = cases();
    let names: BTreeSet<&str> = cases.iter().map(|case| case.0).collect();
    for name in names {
        let (folder, original) = converted_with_config(name);
        let run = ["run", text(folder.path()), "--ids", "1,2", "-n", "1"];
        for (_, key, value) in cases.iter().filter(|case| case.0 == name) {
            with_config(folder.path(), &original, key, value);
            refused(&run, &[]);
        }
    }
}

#[test]
fn a_config_edited_after_the_conversion() {
    for name in ["llama-2-silu", "opt-pre-ln", "phi-2", "persimmon"] {
        let (folder, original) = converted_with_config(name);
        let run = ["run", text(folder.path()), "--ids", "1,2", "-n", "1"];
        // Numbers that are possible, but not those of the tensors.
        for (layers, part) in [(2, "num_hidden_layers is 2"), (4, "num_hidden_layers is 4")] {
            with_config(
                folder.path(),
                &original,
                "num_hidden_layers",
                &json!(layers),
            );
            refused(&run, &["config.json", part, "3 layers"]);
        }
        let mut unprojected = original.clone();
        unprojected["word_embed_proj_dim"] = Value::Null;
        for (key, value) in [("hidden_size", 128), ("vocab_size", 321)] {
            with_config(folder.path(), &unprojected, key, &json!(value));
            refused(&run, &[&value.to_string()]);
        }
        fs::write(folder.path().join("config.json"), "{}").unwrap();
        refused(&run, &["config.json", "2 bytes"]);
        // As long as before, but the heads are others.
        with_config(folder.path(), &original, "num_attention_heads", &json!(4));
        let path = folder.path().join("config.json");
        let same = fs::read_to_string(&path).unwrap();
        let edited = same.replace("\"num_attention_heads\":4", "\"num_attention_heads\":8");
        assert_ne!(same, edited);
        fs::write(&path, edited).unwrap();
        refused(&run, &["config.json", "xxh3"]);
        fs::remove_file(folder.path().join("config.json")).unwrap();
        refused(&run, &["config.json"]);
    }
}

#[test]
fn a_manifest_that_takes_the_gate_away_or_is_no_file() {
    for (name, gate) in [
        ("llama-2-silu", Value::Null),
        ("opt-pre-ln", json!("x.weight")),
    ] {
        let folder = complete_folder(name, false);
        let path = folder.path().join("wick.json");
        let run = ["run", text(folder.path()), "--ids", "1,2", "-n", "1"];
        let original = fs::read(&path).unwrap();
        edit_json(&path, |manifest| {
            for layer in manifest["layers"].as_array_mut().unwrap() {
                layer["gate"] = gate.clone();
            }
        });
        refused(&run, &[]);
        fs::write(&path, original).unwrap();
        let large = fs::File::create(&path).unwrap();
        large.set_len(65 << 20).unwrap();
        refused(&run, &["wick.json", "too many"]);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        refused(&run, &["wick.json", "not a plain file"]);
        fs::remove_file(&path).unwrap();
        let fifo = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(fifo.unwrap().success());
        refused(&run, &["wick.json", "not a plain file"]);
    }
}
