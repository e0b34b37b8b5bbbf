//! Same selection, same bytes: at every budget, thread count and way of reading.

use candle_wick::{DirectIo, FlashFolder, IoOptions, SelectorKind};
use candle_wick_models::{LoadOptions, LoadedModel};

use crate::support::{converted, expected, fixture, greedy};

/// Bits of the logits of a prompt scored position by position, and of decoding after it.
fn fingerprint(model: &mut LoadedModel, ids: &[u32]) -> Vec<u32> {
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
fn with_slots(folder: &FlashFolder, selector: SelectorKind, slots: usize) -> LoadedModel {
    let options = LoadOptions {
        selector: Some(selector),
        slots_per_layer: Some(slots),
        ..LoadOptions::default()
    };
    LoadedModel::load(folder.clone(), &options).unwrap()
}

#[test]
fn logits_are_the_same_bytes_at_every_slot_count_thread_count_and_io_mode() {
    for (name, selectors) in [
        (
            "opt-pre-ln",
            vec![SelectorKind::Dense, SelectorKind::Oracle],
        ),
        (
            "llama-relu-gqa-f16",
            vec![SelectorKind::Dense, SelectorKind::Oracle],
        ),
        ("llama-2-silu", vec![SelectorKind::Dense]),
    ] {
        let out = converted(&fixture(name));
        let ids = expected(name).ids;
        for selector in selectors {
            let mut reference = None;
            for direct in [DirectIo::Preferred, DirectIo::Off] {
                let io = IoOptions { direct, threads: 4 };
                let folder = FlashFolder::open(out.path(), io).unwrap();
                let ffn = folder.manifest().layers[0].intermediate_size;
                let token_set = token_set(&folder, selector, &ids);
                for slots in [2, 3, token_set - 1, token_set + 1, ffn / 2, ffn - 1, ffn] {
                    for threads in [1, 3] {
                        let pool = rayon::ThreadPoolBuilder::new()
                            .num_threads(threads)
                            .build()
                            .unwrap();
                        let got = pool.install(|| {
                            fingerprint(&mut with_slots(&folder, selector, slots), &ids)
                        });
                        let reference = reference.get_or_insert_with(|| got.clone());
                        assert!(
                            *reference == got,
                            "{name} {selector} {slots} slots {threads} threads {direct:?}"
                        );
                    }
                }
            }
        }
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
    for name in ["opt-pre-ln", "llama-3-rope-scaled-tied"] {
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
