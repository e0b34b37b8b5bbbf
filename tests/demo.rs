//! The shipped model: what its README promises, and what its predictors reach on text it never saw.

use std::path::{Path, PathBuf};

use candle_wick::{Memory, SelectorKind};
use candle_wick_convert::predictor::{evaluate, Quality};
use candle_wick_models::{load, WickTokenizer};
use serde::Deserialize;

use crate::support::{converted, greedy, logprob, options};

pub(crate) fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/opt-9m")
}

/// The converted model with its shipped predictors.
pub fn demo() -> tempfile::TempDir {
    let folder = converted(&assets());
    let predictors = "predictors.safetensors";
    std::fs::copy(assets().join(predictors), folder.path().join(predictors)).unwrap();
    folder
}

#[derive(Deserialize)]
struct Reference {
    prompt: String,
    ids: Vec<u32>,
    logprobs: Vec<f64>,
    greedy: Vec<u32>,
    greedy_text: String,
}

#[test]
fn dense_writes_what_transformers_writes() {
    let json = std::fs::read_to_string(assets().join("expected.json")).unwrap();
    let expected: Reference = serde_json::from_str(&json).unwrap();
    let folder = demo();
    let tokenizer = WickTokenizer::load(folder.path()).unwrap().unwrap();
    assert_eq!(tokenizer.encode(&expected.prompt).unwrap(), expected.ids);
    let mut model = load(folder.path(), &options(SelectorKind::Dense, None)).unwrap();
    let mut index = 0;
    let mut compare = |_, logits: &[f32]| {
        if let Some(reference) = expected.logprobs.get(index) {
            let got = logprob(logits, expected.ids[index + 1]);
            assert!(
                (got - reference).abs() < 1e-3,
                "{index}: {got}, {reference}"
            );
        }
        index += 1;
        Ok(())
    };
    model.forward_each(&expected.ids, &mut compare).unwrap();
    model.reset();
    let ids = greedy(&mut model, &expected.ids, expected.greedy.len());
    assert_eq!(ids, expected.greedy);
    assert_eq!(tokenizer.decode(&ids).unwrap(), expected.greedy_text);
}

#[test]
fn predictors_find_the_active_neurons_of_text_never_trained_on() {
    let folder = demo();
    let tokenizer = WickTokenizer::load(folder.path()).unwrap().unwrap();
    let heldout = std::fs::read_to_string(assets().join("heldout.txt")).unwrap();
    let mut ids = tokenizer.encode(&heldout).unwrap();
    ids.truncate(16_384);
    let options = options(SelectorKind::LowRank, None);
    let model = load(folder.path(), &options).unwrap();
    let found = evaluate(model, &ids, 5, &|_| {}).unwrap();
    for quality in found
        .layers
        .iter()
        .map(|layer| &layer.quality)
        .chain([&found.all])
    {
        println!(
            "recall {:.3}, selected {:.1} %, truly active {:.1} %",
            quality.recall,
            100.0 * quality.selected,
            100.0 * quality.active
        );
    }
    let Quality {
        recall, selected, ..
    } = found.all;
    assert!(recall >= 0.96, "recall {recall}");
    assert!(selected <= 0.11, "selected {selected}");
}

/// The layers are not equally dense: the first has most of the slots.
#[test]
fn slots_go_where_the_need_is() {
    let folder = demo();
    let options = options(SelectorKind::LowRank, Some(Memory::Percent(60.0)));
    let mut model = load(folder.path(), &options).unwrap();
    let slots = model.plan().slots_per_layer.clone();
    assert!(slots[0] > 2 * slots[1], "{slots:?}");
    assert!(slots.iter().all(|slots| *slots >= 256), "{slots:?}");
    // The first token fills the slots; after that most of what is needed lies there.
    model.forward(&[1765, 352, 260, 2272]).unwrap();
    model.reset_stats();
    for id in [2386, 13, 283, 261, 285, 336, 1013, 270] {
        model.forward(&[id]).unwrap();
    }
    let stats = model.stats();
    println!(
        "hit rate {:.3}, selected {:.3}",
        stats.hit_rate(),
        stats.selected_fraction()
    );
    assert!(stats.hit_rate() > 0.6 && stats.selected_fraction() < 0.2);
}
