//! Who leaves the neuron cache changes what is read, and never a result.

use std::path::Path;
use std::process::Command;

use candle_wick::{CachePolicy, FlashFolder, IoOptions, NeuronCache, RecordedTrace, SelectorKind};
use candle_wick_models::{record_trace, LoadOptions, LoadedModel};

use crate::demo::demo;
use crate::support::{converted, field, fixture};

/// Policies with and without the paper's eager window; the first is the yardstick.
const RULES: [(CachePolicy, Option<usize>); 5] = [
    (CachePolicy::Lru, None),
    (CachePolicy::Lfu, None),
    (CachePolicy::Lru, Some(1)),
    (CachePolicy::Lru, Some(5)),
    (CachePolicy::Lfu, Some(3)),
];

fn model(folder: &Path, selector: SelectorKind, slots: usize, rule: usize) -> LoadedModel {
    let (cache_policy, window_tokens) = RULES[rule];
    let options = LoadOptions {
        selector: Some(selector),
        slots_per_layer: Some(slots),
        cache_policy,
        window_tokens,
        ..LoadOptions::default()
    };
    candle_wick_models::load(folder, &options).unwrap()
}

/// Bits of the logits of a prompt, of some tokens after it, of another prompt.
fn fingerprint(model: &mut LoadedModel) -> Vec<u32> {
    let steps = [
        &[1, 5, 9, 2, 44, 17, 3][..],
        &[8],
        &[21],
        &[4],
        &[8],
        &[9, 10, 11],
    ];
    let logits = steps.map(|ids| model.forward(ids).unwrap());
    logits
        .iter()
        .flatten()
        .map(|logit| logit.to_bits())
        .collect()
}

#[test]
fn every_policy_gives_the_same_bytes() {
    for (name, selector) in [
        ("opt-pre-ln", SelectorKind::Oracle),
        ("llama-relu-gqa-f16", SelectorKind::Oracle),
        ("falcon-40b-new-architecture", SelectorKind::Dense),
        ("phi-2", SelectorKind::Dense),
    ] {
        let out = converted(&fixture(name));
        for slots in [12, 40] {
            let bits = |rule| fingerprint(&mut model(out.path(), selector, slots, rule));
            let expected = bits(0);
            for (rule, named) in RULES.iter().enumerate().skip(1) {
                assert!(bits(rule) == expected, "{name} {named:?} {slots} slots");
            }
        }
    }
}

/// What a model reads is what a cache alone misses on the trace of its tokens.
#[test]
fn a_recorded_trace_tells_what_a_model_will_read() {
    let folder = demo();
    let ids: Vec<u32> = (0..150).map(|i| 100 + i * 37 % 900).collect();
    let path = folder.path().join("a.trace");
    let mut recorded = model(folder.path(), SelectorKind::LowRank, 600, 0);
    record_trace(&mut recorded, &ids, &path, &|_| {}).unwrap();
    let trace = RecordedTrace::open(&path).unwrap();
    for slots in [150, 500] {
        let mut all_misses = Vec::new();
        for (rule, (policy, window)) in RULES.into_iter().enumerate() {
            let mut model = model(folder.path(), SelectorKind::LowRank, slots, rule);
            for id in &ids {
                model.forward(&[*id]).unwrap();
            }
            let layers = 0..trace.intermediate_sizes().len();
            let misses = layers.map(|layer| {
                let layer = trace.layer(layer).unwrap();
                let width = layer.intermediate_size();
                let mut cache = NeuronCache::new(width, slots, policy, window);
                let mut misses = 0;
                for neurons in layer.iter() {
                    // As many neurons a pass as in decoding.
                    let plan = cache.plan(neurons, 2048);
                    misses += plan.miss_count() as u64;
                    cache.commit(neurons, plan, 1, |_| 1);
                }
                misses
            });
            let misses: u64 = misses.sum();
            assert_eq!(model.stats().misses, misses, "{policy} {window:?} {slots}");
            all_misses.push(misses);
        }
        all_misses.sort_unstable();
        all_misses.dedup();
        assert!(
            all_misses.len() >= 4,
            "policies do not differ: {all_misses:?}"
        );
    }
}

#[test]
fn the_flag_chooses_the_policy() {
    let folder = demo();
    let run = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
        let fixed = [
            "--ids",
            "5,6,7,8",
            "-n",
            "40",
            "--temperature",
            "0",
            "--slots",
            "300",
            "--json",
        ];
        command
            .arg("run")
            .arg(folder.path())
            .args(fixed)
            .args(words);
        command.output().unwrap()
    };
    let said = |words: &[&str]| -> serde_json::Value {
        serde_json::from_slice(&run(words).stdout).unwrap()
    };
    let [default, lru, lfu] = [
        said(&[]),
        said(&["--cache-policy", "lru"]),
        said(&["--cache-policy", "lfu"]),
    ];
    assert_eq!(field(&default, "ids"), field(&lru, "ids"));
    let read = |said: &serde_json::Value| said["bytes_read_per_token"].as_f64().unwrap();
    assert_eq!(read(&default), read(&lfu));
    assert_ne!(read(&default), read(&lru));
    let unknown = run(&["--cache-policy", "best"]);
    let stderr = String::from_utf8(unknown.stderr).unwrap();
    assert!(
        stderr.contains("best") && stderr.contains("lru, lfu"),
        "{stderr}"
    );
}

#[test]
fn traces_know_their_model() {
    let open = |path: &Path| FlashFolder::open(path, IoOptions::default()).unwrap();
    let (own, other) = (
        converted(&fixture("opt-pre-ln")),
        converted(&fixture("opt-350m-post-ln")),
    );
    let path = own.path().join("a.trace");
    let mut recorded = model(own.path(), SelectorKind::Oracle, 40, 0);
    record_trace(&mut recorded, &[1, 2, 3], &path, &|_| {}).unwrap();
    let trace = RecordedTrace::open(&path).unwrap();
    trace.check_model(open(own.path()).manifest()).unwrap();
    let error = trace
        .check_model(open(other.path()).manifest())
        .unwrap_err();
    assert!(error.to_string().contains("record it again"), "{error}");
    let mut dense = model(own.path(), SelectorKind::Dense, 40, 0);
    let error = record_trace(&mut dense, &[1, 2], &path, &|_| {}).unwrap_err();
    assert!(
        error.to_string().contains("oracle, lowrank or gate"),
        "{error}"
    );
}
