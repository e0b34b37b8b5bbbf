//! Same selection, same bytes: at every budget, thread count and way of reading.

use std::path::Path;

use candle_wick::{DirectIo, FlashFolder, IoOptions, SelectorKind};
use candle_wick_models::{LoadOptions, LoadedModel};
use serde_json::Value;

use crate::demo::demo;
use crate::support::{converted, expected, field, fixture, greedy, json};

/// Bits of the logits of a prompt scored position by position, and of decoding after it.
pub(crate) fn fingerprint(model: &mut LoadedModel, ids: &[u32]) -> Vec<u32> {
    let mut bits = Vec::new();
    let mut keep = |_, logits: &[f32]| {
        bits.extend(logits.iter().map(|logit| logit.to_bits()));
        Ok(())
    };
    model.forward_each(ids, &mut keep).unwrap();
    model.reset();
    bits.extend(greedy(model, ids, 12));
    bits.extend(
        model
            .forward(&[3])
            .unwrap()
            .iter()
            .map(|logit| logit.to_bits()),
    );
    bits
}

/// Loads with exactly `slots` slots a layer.
pub(crate) fn with_slots(
    folder: &FlashFolder,
    selector: SelectorKind,
    slots: usize,
) -> LoadedModel {
    let options = LoadOptions {
        selector: Some(selector),
        slots_per_layer: Some(slots),
        ..LoadOptions::default()
    };
    LoadedModel::load(folder.clone(), &options).unwrap()
}

/// Fingerprints at every slot count between the smallest and all, two thread counts, direct and buffered.
fn check(name: &str, out: &Path, ids: &[u32], smallest: &[usize], selectors: &[SelectorKind]) {
    for &selector in selectors {
        let mut reference = None;
        for direct in [DirectIo::Preferred, DirectIo::Off] {
            let io = IoOptions {
                direct,
                threads: 4,
                ..IoOptions::default()
            };
            let folder = FlashFolder::open(out, io).unwrap();
            let ffn = folder.manifest().layers[0].intermediate_size;
            let set = token_set(&folder, selector, ids);
            for &slots in smallest
                .iter()
                .chain(&[set - 1, set + 1, ffn / 2, ffn - 1, ffn])
            {
                for threads in [1, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    let run = || fingerprint(&mut with_slots(&folder, selector, slots), ids);
                    let got = pool.build().unwrap().install(run);
                    let reference = reference.get_or_insert_with(|| got.clone());
                    let case =
                        format!("{name} {selector} {slots} slots {threads} threads {direct:?}");
                    assert!(*reference == got, "{case}");
                }
            }
        }
    }
}

#[test]
fn tiny_models_give_the_same_bytes_everywhere() {
    let both = [SelectorKind::Dense, SelectorKind::Oracle];
    for (name, selectors) in [
        ("opt-pre-ln", &both[..]),
        ("llama-relu-gqa-f16", &both[..]),
        ("llama-2-silu", &both[..1]),
        ("falcon-40b-new-architecture", &both[..1]),
        ("phi-2", &both[..1]),
        ("persimmon", &both[..]),
        ("falcon-rw-alibi", &both[..1]),
        ("opt-350m-post-ln", &both[..]),
        ("mistral-sliding-window", &both[..1]),
    ] {
        let out = converted(&fixture(name));
        // Five slots are below the floor of any budget, and still enough to be exact.
        check(name, out.path(), &expected(name).ids, &[5], selectors);
    }
}

#[test]
fn the_demo_model_gives_the_same_bytes_everywhere() {
    let out = demo();
    let ids = [
        1765, 352, 260, 2272, 2386, 13, 283, 261, 285, 336, 1013, 270,
    ];
    let selectors = [
        SelectorKind::Dense,
        SelectorKind::Oracle,
        SelectorKind::LowRank,
    ];
    check("opt-9m", out.path(), &ids, &[256], &selectors);
}

/// At the floor the head and attention are streamed, chunks are short, and neurons leave early. In processes of
/// their own: a budget counts what the process holds already, and tests share theirs.
#[test]
fn the_floor_gives_the_same_bytes_as_plenty() {
    let out = demo();
    let folder = out.path().to_str().unwrap();
    let ids: Vec<String> = (0..40)
        .map(|index| ((index * 37 + 11) % 4096).to_string())
        .collect();
    let ids = ids.join(",");
    for selector in ["dense", "lowrank"] {
        let plan = json(&["plan", folder, "--selector", selector]);
        assert_eq!(
            (
                plan["streamed"].as_array().unwrap().len(),
                &plan["chunk_tokens"]
            ),
            (0, &128.into())
        );
        let floor = (plan["floor_bytes"].as_u64().unwrap() + (1 << 20)).to_string();
        let tight = ["--memory", &floor, "--window", "3"];
        let plan = json(&[&["plan", folder, "--selector", selector][..], &tight].concat());
        assert!(!plan["streamed"].as_array().unwrap().is_empty(), "{plan}");
        assert!(plan["chunk_tokens"].as_u64().unwrap() < 128, "{plan}");
        let score = ["score", folder, "--selector", selector, "--ids", &ids];
        assert_eq!(
            json(&score),
            json(&[&score[..], &tight].concat()),
            "{selector}"
        );
        let run = [
            "run",
            folder,
            "--selector",
            selector,
            "--ids",
            &ids,
            "-n",
            "6",
        ];
        let (plenty, tight) = (json(&run), json(&[&run[..], &tight].concat()));
        assert_eq!(field(&plenty, "ids"), field(&tight, "ids"), "{selector}");
        let read = |run: &Value| run["bytes_read_per_token"].as_f64().unwrap();
        assert!(read(&tight) > read(&plenty));
    }
}

/// The neurons that one token selects in one layer, on average.
fn token_set(folder: &FlashFolder, selector: SelectorKind, ids: &[u32]) -> usize {
    let ffn = folder.manifest().layers[0].intermediate_size;
    let mut model = with_slots(folder, selector, ffn);
    model.forward(ids).unwrap();
    let stats = model.stats();
    (stats.selected / stats.tokens) as usize
}

/// A prompt's logits do not depend on how many of its tokens are computed together.
#[test]
fn prompt_and_decode_agree_to_the_bit() {
    for name in [
        "opt-pre-ln",
        "opt-350m-post-ln",
        "llama-3-rope-scaled-tied",
        "mistral-sliding-window",
    ] {
        let out = converted(&fixture(name));
        let ids = expected(name).ids;
        let folder = FlashFolder::open(out.path(), IoOptions::default()).unwrap();
        let mut model = with_slots(&folder, SelectorKind::Dense, 64);
        let together = model.forward(&ids).unwrap();
        model.reset();
        let mut one_by_one = Vec::new();
        for id in &ids {
            one_by_one = model.forward(&[*id]).unwrap();
        }
        let bits =
            |logits: &[f32]| -> Vec<u32> { logits.iter().map(|logit| logit.to_bits()).collect() };
        assert_eq!(bits(&together), bits(&one_by_one), "{name}");
    }
}
