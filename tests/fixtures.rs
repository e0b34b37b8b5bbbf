//! Our definitions against transformers' numbers.

use candle_wick::{FfnStats, SelectorKind};
use candle_wick_convert::Layout;
use candle_wick_models::{load, LoadOptions};
use safetensors::SafeTensors;
use serde::Deserialize;
use tempfile::TempDir;

use crate::support::{
    all_logits, converted, converted_as, converted_to, expected, fixture, greedy, logprob, options,
    Expected,
};

/// Checkpoints with how far logits and log-probabilities may be from transformers' numbers: 2e-4 for f32 files,
/// 1e-3 for f16 and bf16 ones, whose weights are rounded.
const FIXTURES: &[(&str, f64)] = &[
    ("opt-pre-ln", 2e-4),
    ("opt-350m-post-ln", 2e-4),
    ("opt-no-bias-no-affine", 2e-4),
    ("opt-gelu-own-head", 2e-4),
    ("opt-no-final-norm", 1e-3),
    ("opt-post-ln-unprojected", 1e-3),
    ("opt-pre-ln-projected", 1e-3),
    ("opt-old-prefix-f16-bin-sharded", 1e-3),
    ("opt-legacy-f16-bin", 1e-3),
    ("opt-bf16-bin", 1e-3),
    ("llama-2-silu", 2e-4),
    // Its reference has the rotary frequencies rounded to f16 as well, which moves its logits by 1.6e-3; see
    // `rounded_weights_equal_float64_references`.
    ("llama-relu-gqa-f16", 2e-3),
    ("llama-3-rope-scaled-tied", 2e-4),
    ("falcon-7b-multi-query", 2e-4),
    // Its reference has them rounded to bf16, which moves its logits by 2.5e-3; see the same test.
    ("falcon-40b-new-architecture", 3e-3),
    ("falcon-rw-alibi", 2e-4),
    ("falcon-alibi-multi-head-parallel", 1e-3),
    ("falcon-alibi-multi-query-parallel", 1e-3),
    ("falcon-alibi-multi-query-sequential", 1e-3),
    ("falcon-alibi-new-architecture", 1e-3),
    ("falcon-bias-multi-query", 1e-3),
    ("falcon-multi-head-parallel", 2e-4),
    ("falcon-multi-head-sequential-bias", 1e-3),
    ("falcon-multi-query-sequential", 2e-4),
    ("falcon-new-architecture-multi-head", 1e-3),
    ("falcon-new-architecture-one-norm", 1e-3),
    ("falcon-old-refined-web", 1e-3),
    ("falcon-old-refined-web-alibi", 1e-3),
    ("falcon-old-refined-web-model", 1e-3),
    ("falcon-own-head", 1e-3),
    ("falcon-rope-linear", 1e-3),
    ("falcon-rope-parameters", 1e-3),
    ("falcon-relu-by-option", 2e-4),
    ("llama-biases", 2e-4),
    ("llama-head-dim", 2e-4),
    ("llama-rope-linear", 1e-3),
    ("llama-rope-dynamic", 1e-3),
    ("llama-gelu", 1e-3),
    ("llama-oldest", 1e-3),
    ("llama-tied-duplicate-head", 1e-3),
    ("llama-bf16-rope-parameters", 1e-3),
    ("llama-3-rope-parameters", 1e-3),
    ("llama-mixed-dtypes", 1e-3),
    ("sparsellama-fatrelu", 2e-4),
    ("mistral-sliding-window", 2e-4),
    ("mistral-no-window", 1e-3),
    ("qwen2", 1e-3),
    ("qwen2-sliding-window", 2e-4),
    ("phi-2", 2e-4),
    ("phi-msft", 1e-3),
    ("phi-fused-query-key-value", 1e-3),
    ("phi-qk-layernorm", 1e-3),
    ("phi-grouped-query", 2e-4),
    ("phi-f16-overflow", 1e-3),
    ("phi-relu", 2e-4),
    ("phi-rope-parameters", 1e-3),
    ("phi-mixformer-sequential", 1e-3),
    ("persimmon", 1e-3),
    ("persimmon-no-qk-layernorm", 2e-4),
    ("persimmon-rope-parameters", 1e-3),
    ("persimmon-defaults", 1e-3),
];

/// Below this gap between the two likeliest tokens another order of sums may choose the other one.
const GREEDY_MARGIN: f64 = 0.01;

/// Dense, and the oracle where neurons are exactly zero; with every neuron in a slot and with slots for a few.
#[test]
fn every_fixture_equals_transformers() {
    for (name, tolerance) in FIXTURES {
        let expected = expected(name);
        let folder = converted_as(&fixture(name), &expected.convert);
        for selector in selectors(&folder) {
            for slots in [None, Some(7)] {
                let stats = check_family(name, &expected, &folder, *tolerance, selector, slots);
                let skipped = stats.neurons - stats.selected;
                match selector {
                    SelectorKind::Dense => assert_eq!(skipped, 0, "{name}"),
                    _ => assert!(skipped > stats.neurons / 4, "{name}: {skipped} skipped"),
                }
            }
        }
    }
}

/// By columns, all of them: a model of each kind of FFN.
#[test]
fn columns_equal_transformers_too() {
    for name in [
        "llama-2-silu",
        "llama-biases",
        "opt-350m-post-ln",
        "falcon-7b-multi-query",
        "phi-2",
        "persimmon",
    ] {
        let (_, tolerance) = FIXTURES.iter().find(|(known, _)| *known == name).unwrap();
        let expected = expected(name);
        let folder = converted_to(&fixture(name), &expected.convert, Layout::Channel);
        for slots in [None, Some(7)] {
            let dense = SelectorKind::Dense;
            let stats = check_family(name, &expected, &folder, *tolerance, dense, slots);
            assert_eq!(stats.neurons, stats.selected, "{name}");
            assert_eq!(stats.misses > 0, slots.is_some(), "{name}");
        }
    }
}

#[test]
fn no_fixture_is_forgotten() {
    let folders = std::fs::read_dir(fixture("")).unwrap();
    let mut folders: Vec<String> = folders
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    let mut listed: Vec<&str> = FIXTURES.iter().map(|(name, _)| *name).collect();
    folders.sort_unstable();
    listed.sort_unstable();
    assert_eq!(folders, listed);
}

fn check_family(
    name: &str,
    expected: &Expected,
    folder: &TempDir,
    tolerance: f64,
    selector: SelectorKind,
    slots_per_layer: Option<usize>,
) -> FfnStats {
    let options = LoadOptions {
        slots_per_layer,
        ..options(selector, None)
    };
    let mut model = load(folder.path(), &options).unwrap();
    let logits = all_logits(&mut model, &expected.ids);
    let case = format!("{name} {selector} {slots_per_layer:?}");
    for (index, reference) in expected.logprobs.iter().enumerate() {
        let got = logprob(&logits[index], expected.ids[index + 1]);
        let difference = (got - reference).abs();
        assert!(
            difference < tolerance,
            "{case} logprob {index}: {got}, {reference}"
        );
    }
    let last = logits.last().unwrap();
    assert_eq!(last.len(), expected.last_logits.len(), "{case}");
    for (index, (got, reference)) in last.iter().zip(&expected.last_logits).enumerate() {
        let difference = f64::from((got - reference).abs());
        assert!(
            difference < tolerance,
            "{case} logit {index}: {got}, {reference}"
        );
    }
    if expected.greedy_margin_min > GREEDY_MARGIN {
        model.reset();
        let count = expected.greedy.len();
        assert_eq!(
            greedy(&mut model, &expected.ids, count),
            expected.greedy,
            "{case}"
        );
    }
    model.stats()
}

/// `scripts/llama_reference.py` and `scripts/rope_reference.py` made these numbers, with the frequencies that
/// transformers uses for a model that is loaded in f16 or bf16.
#[test]
fn rounded_weights_equal_float64_references() {
    for name in [
        "llama-relu-gqa-f16",
        "persimmon",
        "falcon-40b-new-architecture",
    ] {
        let json = std::fs::read_to_string(fixture(name).join("expected_float64.json")).unwrap();
        let reference: Reference = serde_json::from_str(&json).unwrap();
        let ids = expected(name).ids;
        let folder = converted(&fixture(name));
        for selector in selectors(&folder) {
            let mut model = load(folder.path(), &options(selector, None)).unwrap();
            let logits = all_logits(&mut model, &ids);
            let case = format!("{name} {selector}");
            for (index, reference) in reference.logprobs.iter().enumerate() {
                let got = logprob(&logits[index], ids[index + 1]);
                let difference = (got - reference).abs();
                assert!(difference < 2e-5, "{case} {index}: {got}, {reference}");
            }
            for (got, reference) in logits[23].iter().zip(&reference.last_logits) {
                let difference = (f64::from(*got) - reference).abs();
                assert!(difference < 2e-5, "{case}: {got}, {reference}");
            }
        }
    }
}

/// Those that are exact for a model.
fn selectors(folder: &TempDir) -> Vec<SelectorKind> {
    let model = load(folder.path(), &LoadOptions::default()).unwrap();
    let mut selectors = vec![SelectorKind::Dense];
    if model.activation().is_relu_like() {
        selectors.push(SelectorKind::Oracle);
    }
    selectors
}

#[derive(Deserialize)]
struct Reference {
    logprobs: Vec<f64>,
    last_logits: Vec<f64>,
}

/// transformers ties the head's weight alone: its bias stays.
#[test]
fn a_tied_phi_keeps_the_bias_of_its_head() {
    let source = tempfile::tempdir().unwrap();
    let original = fixture("phi-2");
    let config = std::fs::read_to_string(original.join("config.json")).unwrap();
    std::fs::write(source.path().join("config.json"), config).unwrap();
    let bytes = std::fs::read(original.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let ids = expected("phi-2").ids;
    let mut seen = Vec::new();
    for tied in [false, true] {
        let views = tensors.names().into_iter().filter_map(|name| {
            let stored = match name {
                "lm_head.weight" if tied => return None,
                "lm_head.weight" => "model.embed_tokens.weight",
                _ => name,
            };
            Some((name, tensors.tensor(stored).unwrap()))
        });
        let path = source.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &path).unwrap();
        let folder = converted(source.path());
        let config = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["tie_word_embeddings"], tied);
        let mut model = load(folder.path(), &LoadOptions::default()).unwrap();
        seen.push(model.forward(&ids).unwrap());
    }
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn oracle_is_refused_where_nothing_is_exactly_zero() {
    let folder = converted(&fixture("llama-2-silu"));
    for selector in [SelectorKind::Oracle, SelectorKind::LowRank] {
        let error = load(folder.path(), &options(selector, None))
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("silu") && error.contains("dense"), "{error}");
    }
}
