//! Adapters are merged as peft merges them, or refused; the merged checkpoint converts like any other.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle::{DType, Device, Tensor};
use candle_wick_convert::{convert, lora, ConvertOptions};
use serde_json::{json, Value};
use tempfile::TempDir;

use crate::support::fixture;

const LLAMA: &str = "llama-2-silu";
const RANK: usize = 3;
const GATE: &str = "model.layers.1.mlp.gate_proj";
const QUERY: &str = "model.layers.0.self_attn.q_proj";

fn weights(folder: &Path) -> HashMap<String, Tensor> {
    candle::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap()
}

fn wave(shape: (usize, usize), step: f32) -> Tensor {
    let values = (0..shape.0 * shape.1).map(|i| (i as f32 * step).sin());
    let values = Tensor::from_iter(values, &Device::Cpu).unwrap();
    values.reshape(shape).unwrap()
}

fn config() -> Value {
    json!({
        "peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "use_dora": false, "use_rslora": false,
        "modules_to_save": null, "rank_pattern": {}, "target_modules": ["gate_proj", "q_proj"],
        "init_lora_weights": true,
    })
}

/// The tensors of an adapter of two matrices.
fn pairs(base: &HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    let mut tensors = HashMap::new();
    for (module, step) in [(GATE, 0.37), (QUERY, 0.61)] {
        let (out, input) = base[&format!("{module}.weight")].dims2().unwrap();
        let name = |part| format!("base_model.model.{module}.lora_{part}.weight");
        tensors.insert(name("A"), wave((RANK, input), step));
        tensors.insert(name("B"), wave((out, RANK), step * 2.0));
    }
    tensors
}

fn adapter(config: &Value, tensors: &HashMap<String, Tensor>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("adapter_config.json"),
        config.to_string(),
    )
    .unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    candle::safetensors::save(tensors, path).unwrap();
    folder
}

fn difference(a: &Tensor, b: &Tensor) -> f32 {
    let as_f32 = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
    let gap = (as_f32(a) - as_f32(b)).unwrap().abs().unwrap();
    gap.max_all().unwrap().to_scalar().unwrap()
}

#[test]
fn what_an_adapter_adds_is_added_and_nothing_else_moves() {
    let base = weights(&fixture(LLAMA));
    let factors = pairs(&base);
    let mut root = config();
    root["use_rslora"] = json!(true);
    let rooted = 6.0 / (RANK as f64).sqrt();
    for (config, scaling) in [(config(), 2.0), (root, rooted)] {
        let adapter = adapter(&config, &factors);
        let out = tempfile::tempdir().unwrap();
        let report = lora::apply(&fixture(LLAMA), adapter.path(), out.path(), &|_| {}).unwrap();
        assert_eq!((report.merged, report.tensors), (2, base.len()));
        let merged = weights(out.path());
        assert_eq!(merged.len(), base.len());
        for (name, before) in &base {
            let after = &merged[name];
            assert_eq!(after.dtype(), before.dtype());
            let module = name.strip_suffix(".weight").unwrap();
            let factor =
                |part| factors.get(&format!("base_model.model.{module}.lora_{part}.weight"));
            match (factor("A"), factor("B")) {
                (Some(a), Some(b)) => {
                    let added = (b.matmul(a).unwrap() * scaling).unwrap();
                    let before = before.to_dtype(DType::F32).unwrap();
                    let expected = (before + added).unwrap();
                    // Half precision, of values below 16.
                    assert!(difference(after, &expected) < 0.01, "{name}");
                    assert!(difference(after, &base[name]) > 0.5, "{name}");
                }
                _ => assert_eq!(difference(after, before), 0.0, "{name}"),
            }
        }
        let converted = tempfile::tempdir().unwrap();
        convert(
            out.path(),
            converted.path(),
            &ConvertOptions::default(),
            &|_| {},
        )
        .unwrap();
    }
}

/// A good config with one key changed.
fn with(key: &str, value: Value) -> Value {
    let mut config = config();
    config[key] = value;
    config
}

#[test]
fn adapters_that_are_something_else_are_refused() {
    let base = weights(&fixture(LLAMA));
    let good = pairs(&base);
    let renamed = |from: &str, to: &str| {
        let mut tensors = good.clone();
        let tensor = tensors.remove(from).unwrap();
        tensors.insert(to.to_owned(), tensor);
        tensors
    };
    let gate_a = format!("base_model.model.{GATE}.lora_A.weight");
    let gate_b = format!("base_model.model.{GATE}.lora_B.weight");
    let mut half = good.clone();
    half.remove(&gate_b);
    let mut narrow = good.clone();
    narrow.insert(gate_a.clone(), wave((RANK, 7), 0.1));
    let mut whole = good.clone();
    whole.insert(
        gate_a.clone(),
        Tensor::zeros((RANK, 64), DType::I64, &Device::Cpu).unwrap(),
    );
    let elsewhere = "base_model.model.model.layers.99.mlp.up_proj.lora_A.weight";
    let mut other_model = renamed(&gate_a, elsewhere);
    let b = other_model.remove(&gate_b).unwrap();
    other_model.insert(elsewhere.replace("_A", "_B"), b);
    for (config, tensors, named) in [
        (with("peft_type", json!("IA3")), &good, "peft_type"),
        (with("use_dora", json!(true)), &good, "use_dora"),
        (with("bias", json!("all")), &good, "\"bias\": \"all\""),
        (
            with("modules_to_save", json!(["lm_head"])),
            &good,
            "modules_to_save",
        ),
        (with("rank_pattern", json!({"q": 8})), &good, "rank_pattern"),
        (
            with("init_lora_weights", json!("pissa_niter_4")),
            &good,
            "pissa",
        ),
        (with("r", json!(8)), &good, "of rank 3"),
        (with("r", json!(0)), &good, "\"r\" above zero"),
        (with("lora_alpha", json!("many")), &good, "\"lora_alpha\""),
        (config(), &half, "no `base_model"),
        (config(), &narrow, "of shape [3, 7]"),
        (config(), &whole, "I64"),
        (config(), &other_model, "another model"),
        (
            config(),
            &renamed(&gate_a, "base_model.model.lm_head.lora_embedding_A"),
            "no part of a plain",
        ),
        (config(), &HashMap::new(), "no pair"),
        (
            with("lora_alpha", json!(1e40)),
            &good,
            "once the adapter is added",
        ),
    ] {
        let adapter = adapter(&config, tensors);
        let out = tempfile::tempdir().unwrap();
        let to = out.path().join("merged");
        let error = lora::apply(&fixture(LLAMA), adapter.path(), &to, &|_| {}).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains(named) && !error.contains('\n'),
            "{named}: {error}"
        );
        assert!(!to.join("model.safetensors").exists(), "{named}");
    }
}

#[test]
fn folders_that_will_not_do_are_refused() {
    let base = weights(&fixture(LLAMA));
    let good = adapter(&config(), &pairs(&base));
    let empty = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let to = out.path().join("merged");
    let refused = |model: &Path, adapter: &Path, out: &Path| {
        let error = lora::apply(model, adapter, out, &|_| {}).unwrap_err();
        error.to_string()
    };
    let model = fixture(LLAMA);
    assert!(refused(empty.path(), good.path(), &to).contains("no weights"));
    assert!(refused(&model, empty.path(), &to).contains("adapter_config.json"));
    assert!(refused(&model, good.path(), &model.join("merged")).contains("only read"));
    fs::write(out.path().join("note"), "").unwrap();
    assert!(refused(&model, good.path(), out.path()).contains("not empty"));
    let scaled = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model.join(name), scaled.path().join(name)).unwrap();
    }
    let path = scaled.path().join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["quantization_config"] = json!({"quant_method": "fp8"});
    fs::write(&path, json.to_string()).unwrap();
    assert!(refused(scaled.path(), good.path(), &to).contains("quantization_config"));
    // A merge that failed is not in the way of the next.
    let large = adapter(&with("lora_alpha", json!(1e40)), &pairs(&base));
    assert!(refused(&model, large.path(), &to).contains("once the adapter is added"));
    assert!(!to.exists());
    lora::apply(&model, good.path(), &to, &|_| {}).unwrap();
    fs::remove_dir_all(&to).unwrap();
    // Cut anywhere, it is no adapter, and nothing is written.
    let path = good.path().join("adapter_model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for len in (0..bytes.len()).step_by(bytes.len() / 40) {
        fs::write(&path, &bytes[..len]).unwrap();
        let error = refused(&model, good.path(), &to);
        assert!(
            error.contains("adapter_model.safetensors"),
            "{len}: {error}"
        );
        assert!(!to.exists(), "{len}");
    }
    fs::remove_file(&path).unwrap();
    assert!(refused(&model, good.path(), &to).contains("safe_serialization"));
}
