//! M1 to M15: the manifest.

use serde_json::{json, Value};
use wick_format::{FormatError, Manifest};

fn file(name: &str, hash: &str) -> Value {
    json!({ "name": name, "size_bytes": 10, "xxh3": hash })
}

fn layer(n: usize) -> Value {
    json!({
        "prefix": format!("model.layers.{n}.mlp"), "file": "ffn-00001-of-00001.safetensors",
        "layout": "neuron", "hidden_size": 64, "intermediate_size": 176, "stride_bytes": 512,
        "dtype": "f16", "gate": "g", "up": "u", "down": "d",
        "gate_bias": null, "up_bias": "ub", "down_bias": null,
    })
}

/// A sound manifest; the tests break one thing each.
fn sound() -> Value {
    let mut value = json!({
        "format_version": 1, "model_type": "llama", "dtype": "f16", "model_hash": "",
        "layers": [layer(0), layer(1)],
        "files": [
            file("resident.safetensors", "00112233445566aa"),
            file("ffn-00001-of-00001.safetensors", "00112233445566bb"),
        ],
        "sources": [file("model.safetensors", "00112233445566cc")],
        "dense_weight_bytes": 1234,
    });
    rehash(&mut value);
    value
}

/// Makes `model_hash` right again, so that it is not what is refused.
fn rehash(value: &mut Value) {
    if let Ok(manifest) = serde_json::from_value::<Manifest>(value.clone()) {
        let hash = Manifest::hash_of_records(&manifest.layers, &manifest.files);
        value["model_hash"] = json!(hash);
    }
}

fn parse(value: &Value) -> Result<Manifest, FormatError> {
    Manifest::parse(&value.to_string())
}

/// The refusal of a manifest with `pointer` set to `value`.
fn refused(pointer: &str, value: Value) -> String {
    let mut manifest = sound();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    manifest.pointer_mut(parent).unwrap()[key] = value;
    rehash(&mut manifest);
    parse(&manifest).unwrap_err().to_string()
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` not in: {text}");
    }
}

#[test]
fn a_sound_manifest() {
    let manifest = parse(&sound()).unwrap();
    let json = manifest.to_json();
    assert_eq!(Manifest::parse(&json).unwrap(), manifest);
    assert_eq!(Manifest::parse(&json).unwrap().to_json(), json);
    let layer = &manifest.layers[1];
    assert_eq!(layer.neurons_tensor(), "model.layers.1.mlp.neurons");
    assert_eq!(
        layer.checksums_tensor(),
        "model.layers.1.mlp.neurons.crc32c"
    );
    assert_eq!(layer.record_layout().record_bytes(), 384);
    assert!(layer.record_layout().gated);
}

#[test]
fn m1_version() {
    for version in [0u64, 2, 1 << 40] {
        let later = json!({ "format_version": version, "experts": [] });
        let error = parse(&later).unwrap_err();
        assert!(matches!(error, FormatError::Version { got, expected: 1 } if got == version));
    }
    contains(
        &parse(&json!({})).unwrap_err().to_string(),
        &["manifest", "format_version"],
    );
    assert!(Manifest::parse("").is_err());
    assert!(Manifest::parse("[]").is_err());
}

#[test]
fn m2_keys() {
    contains(
        &refused("/rotation", json!(1)),
        &["unknown field `rotation`"],
    );
    contains(
        &refused("/layers/0/permutation", json!(1)),
        &["unknown field `permutation`"],
    );
    contains(
        &refused("/files/0/date", json!(1)),
        &["unknown field `date`"],
    );
    for key in [
        "model_type",
        "dtype",
        "model_hash",
        "layers",
        "files",
        "sources",
        "dense_weight_bytes",
    ] {
        let mut manifest = sound();
        manifest.as_object_mut().unwrap().remove(key);
        contains(
            &parse(&manifest).unwrap_err().to_string(),
            &["missing field", key],
        );
    }
    let twice = sound().to_string().replacen('{', "{\"dtype\":\"f16\",", 1);
    contains(
        &Manifest::parse(&twice).unwrap_err().to_string(),
        &["duplicate field `dtype`"],
    );
}

#[test]
fn m3_layouts_and_dtypes() {
    contains(
        &refused("/layers/0/layout", json!("rotated")),
        &["rotated", "neuron"],
    );
    contains(
        &refused("/layers/0/dtype", json!("int8")),
        &["int8", "bf16"],
    );
    contains(
        &refused("/layers/1/dtype", json!("bf16")),
        &["layers[1].dtype", "bf16", "f16"],
    );
    contains(&refused("/dtype", json!("F16")), &["F16"]);
}

#[test]
fn m4_sizes() {
    for key in ["hidden_size", "intermediate_size"] {
        for size in [0, (1u64 << 24) + 1, u64::MAX] {
            let text = refused(&format!("/layers/0/{key}"), json!(size));
            contains(
                &text,
                &[&format!("layers[0].{key}"), &size.to_string(), "16777216"],
            );
        }
    }
    contains(&refused("/layers/0/hidden_size", json!(-1)), &["manifest"]);
}

#[test]
fn m5_strides() {
    for stride in [0u64, 384, 511, 513, 4608, 1 << 40, u64::MAX - 511] {
        let text = refused("/layers/1/stride_bytes", json!(stride));
        contains(
            &text,
            &["layers[1].stride_bytes", &stride.to_string(), "512", "384"],
        );
    }
    contains(
        &refused("/layers/0/hidden_size", json!(128)),
        &["layers[0].stride_bytes"],
    );
    for stride in [512, 1024, 4096] {
        let mut manifest = sound();
        manifest["layers"][0]["stride_bytes"] = json!(stride);
        parse(&manifest).unwrap();
    }
}

#[test]
fn m6_file_names() {
    for name in [
        "",
        ".",
        "..",
        "a/b",
        "/etc/passwd",
        "a\\b",
        "C:x",
        "a..b",
        "a\0",
        "a\nb",
    ] {
        for list in ["files", "sources"] {
            let text = refused(&format!("/{list}/0/name"), json!(name));
            contains(&text, &[&format!("{list}[0].name"), "without folders"]);
        }
    }
    let text = refused("/files/0/name", json!("ffn-00001-of-00001.safetensors"));
    contains(&text, &["files[1].name", "listed once"]);
}

#[test]
fn m7_files_of_layers() {
    let text = refused("/layers/1/file", json!("ffn-00002-of-00001.safetensors"));
    contains(&text, &["layers[1].file", "ffn-00002", "`files`"]);
}

#[test]
fn m8_names_of_tensors() {
    contains(
        &refused("/layers/1/prefix", json!("model.layers.0.mlp")),
        &["layers[1].prefix"],
    );
    for key in ["prefix", "gate", "up", "down", "up_bias"] {
        contains(
            &refused(&format!("/layers/0/{key}"), json!("")),
            &["layers[0]", "empty"],
        );
    }
}

#[test]
fn m9_biases_without_matrix() {
    let mut manifest = sound();
    manifest["layers"][0]["gate"] = Value::Null;
    parse(&manifest).unwrap();
    manifest["layers"][0]["gate_bias"] = json!("b");
    contains(
        &parse(&manifest).unwrap_err().to_string(),
        &["layers[0].gate_bias"],
    );
}

#[test]
fn m10_hashes_and_sizes() {
    for hash in [
        "",
        "00112233445566a",
        "00112233445566aaa",
        "00112233445566AA",
        "0011223344556 aa",
    ] {
        contains(
            &refused("/files/0/xxh3", json!(hash)),
            &["files[0].xxh3", "hex"],
        );
        contains(
            &refused("/sources/0/xxh3", json!(hash)),
            &["sources[0].xxh3", "hex"],
        );
    }
    contains(
        &refused("/files/0/size_bytes", json!(u64::MAX)),
        &["files[0].size_bytes", "2^63"],
    );
}

#[test]
fn m11_model_hash() {
    let mut manifest = sound();
    manifest["files"][1]["xxh3"] = json!("00112233445566bc");
    contains(&parse(&manifest).unwrap_err().to_string(), &["model_hash"]);
    let hash = |value: &Value| value["model_hash"].as_str().unwrap().to_string();
    let before = hash(&sound());
    rehash(&mut manifest);
    assert_ne!(hash(&manifest), before);
    let mut other = sound();
    other["files"][0]["xxh3"] = json!("00112233445566ff"); // not a record file
    rehash(&mut other);
    assert_eq!(hash(&other), before);
}

#[test]
fn m12_model_type() {
    contains(&refused("/model_type", json!("")), &["model_type", "empty"]);
}

#[test]
fn m13_the_order_of_permuted_layers() {
    let origin = |key: &str, hash: &str| {
        let mut origin =
            json!({ "model_hash": "00112233445566dd", "trace_xxh3": "00112233445566ee" });
        origin[key] = json!(hash);
        origin
    };
    let mut permuted = sound();
    permuted["layers"][1]["layout"] = json!("permuted");
    permuted["order"] = origin("trace_xxh3", "00112233445566ee");
    rehash(&mut permuted);
    let manifest = parse(&permuted).unwrap();
    assert_eq!(manifest.neurons_hash(), "00112233445566dd");
    assert_eq!(Manifest::parse(&manifest.to_json()).unwrap(), manifest);
    let plain = parse(&sound()).unwrap();
    assert_eq!(plain.neurons_hash(), plain.model_hash);
    assert!(
        !plain.to_json().contains("order"),
        "older readers refuse it"
    );
    for key in ["model_hash", "trace_xxh3"] {
        permuted["order"] = origin(key, "00112233445566DD");
        let refused = parse(&permuted).unwrap_err().to_string();
        contains(&refused, &[&format!("order.{key}"), "hex"]);
    }
    let mut unnamed = permuted.clone();
    unnamed["order"] = Value::Null;
    let text = parse(&unnamed).unwrap_err().to_string();
    contains(&text, &["order is missing", "permuted"]);
    let text = refused("/order", origin("model_hash", "00112233445566dd"));
    contains(&text, &["order is set", "no layer is permuted"]);
}

/// A sound manifest whose layers have column records.
fn with_columns(layout: &str) -> Value {
    let mut value = sound();
    for layer in value["layers"].as_array_mut().unwrap() {
        layer["layout"] = json!(layout);
        layer["column_strides"] = json!({ "channel_bytes": 1024, "down_bytes": 512 });
        if layout == "channel" {
            layer["stride_bytes"] = json!(0);
        }
    }
    value
}

#[test]
fn m14_strides_of_columns() {
    for layout in ["channel", "both"] {
        let manifest = parse(&with_columns(layout)).unwrap();
        assert_eq!(Manifest::parse(&manifest.to_json()).unwrap(), manifest);
        for (key, strides, least) in [
            ("channel_bytes", [0u64, 512, 1023, 5120], "704"),
            ("down_bytes", [0, 500, 4608, u64::MAX - 511], "128"),
        ] {
            for stride in strides {
                let mut manifest = with_columns(layout);
                manifest["layers"][1]["column_strides"][key] = json!(stride);
                let text = parse(&manifest).unwrap_err().to_string();
                let field = format!("layers[1].column_strides.{key}");
                contains(&text, &[&field, &stride.to_string(), least]);
            }
        }
        let mut without = with_columns(layout);
        without["layers"][0]["column_strides"] = Value::Null;
        let text = parse(&without).unwrap_err().to_string();
        contains(&text, &["layers[0].column_strides is missing", layout]);
    }
    let mut both = with_columns("both");
    both["layers"][0]["stride_bytes"] = json!(0);
    contains(&parse(&both).unwrap_err().to_string(), &["stride_bytes"]);
    let mut channel = with_columns("channel");
    channel["layers"][0]["stride_bytes"] = json!(512);
    let text = parse(&channel).unwrap_err().to_string();
    contains(&text, &["stride_bytes is 512", "without neuron records"]);
    let strides = json!({ "channel_bytes": 1024, "down_bytes": 512 });
    let text = refused("/layers/0/column_strides", strides);
    contains(&text, &["column_strides is set", "layout neuron"]);
    assert!(
        !parse(&sound()).unwrap().to_json().contains("column"),
        "older readers refuse it"
    );
}

#[test]
fn m15_one_layout_where_there_are_columns() {
    for (layout, other) in [("channel", "both"), ("both", "neuron")] {
        let mut mixed = with_columns(layout);
        mixed["layers"][1] = match other {
            "neuron" => layer(1),
            other => with_columns(other)["layers"][1].clone(),
        };
        rehash(&mut mixed);
        let text = parse(&mixed).unwrap_err().to_string();
        contains(&text, &["layers[1].layout", layout, other]);
    }
}
