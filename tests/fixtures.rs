//! Our definitions against transformers' numbers.

use candle_wick::SelectorKind;
use candle_wick_models::load;
use serde::Deserialize;

use crate::support::{all_logits, converted, expected, fixture, greedy, logprob, options};

const FAMILIES: [(&str, f64); 4] = [
    ("opt-pre-ln", 2e-4),
    ("llama-2-silu", 2e-4),
    // Its reference has the rotary frequencies rounded to f16 as well, which moves its logits by 1.6e-3; see
    // `f16_llama_equals_a_float64_reference`.
    ("llama-relu-gqa-f16", 2e-3),
    ("llama-3-rope-scaled-tied", 2e-4),
];

fn check_family(name: &str, tolerance: f64, selector: SelectorKind) {
    let expected = expected(name);
    let folder = converted(&fixture(name));
    let mut model = load(folder.path(), &options(selector, None)).unwrap();
    let logits = all_logits(&mut model, &expected.ids);
    for (index, reference) in expected.logprobs.iter().enumerate() {
        let got = logprob(&logits[index], expected.ids[index + 1]);
        assert!(
            (got - reference).abs() < tolerance,
            "{name} logprob {index}: {got}, {reference}"
        );
    }
    for (index, (got, reference)) in logits[23].iter().zip(&expected.last_logits).enumerate() {
        let difference = f64::from((got - reference).abs());
        assert!(
            difference < tolerance,
            "{name} logit {index}: {got}, {reference}"
        );
    }
    model.reset();
    let count = expected.greedy.len();
    assert_eq!(
        greedy(&mut model, &expected.ids, count),
        expected.greedy,
        "{name}"
    );
    let stats = model.stats();
    match selector {
        SelectorKind::Dense => assert_eq!(stats.selected, stats.neurons),
        _ => {
            let skipped = stats.neurons - stats.selected;
            println!(
                "{name}: {selector} skipped {skipped} of {} neurons",
                stats.neurons
            );
            assert!(
                skipped > stats.neurons / 4,
                "{name}: only {skipped} skipped"
            );
        }
    }
}

#[test]
fn dense_equals_transformers() {
    for (name, tolerance) in FAMILIES {
        check_family(name, tolerance, SelectorKind::Dense);
    }
}

#[test]
fn oracle_equals_transformers_and_skips_neurons() {
    for (name, tolerance) in [("opt-pre-ln", 2e-4), ("llama-relu-gqa-f16", 2e-3)] {
        check_family(name, tolerance, SelectorKind::Oracle);
    }
}

/// `scripts/llama_reference.py` made these numbers, with the frequencies that transformers uses for a model that
/// is loaded in f16.
#[test]
fn f16_llama_equals_a_float64_reference() {
    let name = "llama-relu-gqa-f16";
    let json = std::fs::read_to_string(fixture(name).join("expected_float64.json")).unwrap();
    let reference: Reference = serde_json::from_str(&json).unwrap();
    let ids = expected(name).ids;
    let folder = converted(&fixture(name));
    for selector in [SelectorKind::Dense, SelectorKind::Oracle] {
        let mut model = load(folder.path(), &options(selector, None)).unwrap();
        let logits = all_logits(&mut model, &ids);
        for (index, reference) in reference.logprobs.iter().enumerate() {
            let got = logprob(&logits[index], ids[index + 1]);
            assert!(
                (got - reference).abs() < 2e-5,
                "logprob {index}: {got}, {reference}"
            );
        }
        for (got, reference) in logits[23].iter().zip(&reference.last_logits) {
            assert!(
                (f64::from(*got) - reference).abs() < 2e-5,
                "{got}, {reference}"
            );
        }
    }
}

#[derive(Deserialize)]
struct Reference {
    logprobs: Vec<f64>,
    last_logits: Vec<f64>,
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
