//! Same bytes with every engine, depth, thread count and switch, and from a disk that answers late, short or not.

use std::num::NonZeroU64;
use std::path::Path;
use std::time::Duration;

use candle::{Device, Module, Tensor};
use candle_wick::{
    Activation, Engine, FlashFolder, FlashMlp, FlashVarBuilder, IoOptions, Lookahead, Placement,
    SelectorKind, SlowDiskOptions, Switches,
};
use candle_wick_models::{LoadOptions, LoadedModel, Result};

use crate::demo::demo;
use crate::support::{converted, fixture};

const IDS: [u32; 7] = [1, 5, 9, 2, 44, 17, 3];

/// Bits of the logits of a prompt, and of some tokens after it.
fn fingerprint(folder: &Path, options: &LoadOptions) -> Result<Vec<u32>> {
    let folder = FlashFolder::open(folder, options.io.clone())?;
    let mut model = LoadedModel::load(folder, options)?;
    let mut bits = Vec::new();
    for ids in [&IDS[..], &[8], &[21], &[4]] {
        let logits = model.forward(ids)?;
        bits.extend(logits.iter().map(|logit| logit.to_bits()));
    }
    Ok(bits)
}

/// 40 slots a layer: most of what is selected is read again and again.
fn options(selector: SelectorKind, engine: Engine, threads: usize) -> LoadOptions {
    LoadOptions {
        selector: Some(selector),
        slots_per_layer: Some(40),
        io: IoOptions {
            engine,
            threads,
            ..IoOptions::default()
        },
        ..LoadOptions::default()
    }
}

/// One of each family, sequential and parallel, gated and not.
const MODELS: [(&str, SelectorKind); 5] = [
    ("opt-pre-ln", SelectorKind::Oracle),
    ("llama-relu-gqa-f16", SelectorKind::Oracle),
    ("falcon-7b-multi-query", SelectorKind::Dense),
    ("falcon-40b-new-architecture", SelectorKind::Dense),
    ("phi-2", SelectorKind::Dense),
];

#[test]
fn engines_depths_threads_and_switches_give_the_same_bytes() {
    for (name, selector) in MODELS {
        let out = converted(&fixture(name));
        let reference = fingerprint(out.path(), &options(selector, Engine::Pool, 4)).unwrap();
        let check = |case: String, options: &LoadOptions, threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let run = || fingerprint(out.path(), options).unwrap();
            let got = pool.build().unwrap().install(run);
            assert!(
                got == reference,
                "{name} {selector} {case}, {threads} threads"
            );
        };
        for engine in [Engine::Pool, Engine::Uring, Engine::Auto] {
            for (depth, threads) in [(1, 1), (2, 2), (7, 3), (64, 4)] {
                let options = options(selector, engine, depth);
                check(format!("{engine} x {depth}"), &options, threads);
            }
        }
        for (overlap, bundling, coalesce) in [
            (false, true, true),
            (true, false, false),
            (false, false, true),
            (true, true, false),
        ] {
            let mut options = options(selector, Engine::Auto, 8);
            options.switches = Switches {
                overlap,
                bundling,
                ..Switches::default()
            };
            options.io.coalesce = coalesce;
            let case = format!("overlap {overlap}, bundling {bundling}, coalesce {coalesce}");
            check(case, &options, 2);
        }
    }
}

#[test]
fn reading_ahead_gives_the_same_bytes_and_is_of_use() {
    let out = demo();
    let text = [
        1765, 352, 260, 2272, 2386, 13, 283, 261, 285, 336, 1013, 270,
    ];
    // Long enough for `Auto` to have tried both ways.
    let ids = text.iter().cycle().take(40);
    let decode = |lookahead: Lookahead, slots: usize, window_tokens: Option<usize>| {
        let mut options = options(SelectorKind::LowRank, Engine::Auto, 8);
        options.slots_per_layer = Some(slots);
        options.window_tokens = window_tokens;
        options.switches.lookahead = lookahead;
        let folder = FlashFolder::open(out.path(), options.io.clone()).unwrap();
        let mut model = LoadedModel::load(folder, &options).unwrap();
        let mut bits = Vec::new();
        for id in ids.clone() {
            let logits = model.forward(&[*id]).unwrap();
            bits.extend(logits.iter().map(|logit| logit.to_bits()));
        }
        (bits, model.stats())
    };
    // More is selected than fits; most fits; all fits.
    for slots in [40, 400, 100_000] {
        let (expected, without) = decode(Lookahead::Off, slots, None);
        let (got, with) = decode(Lookahead::Always, slots, None);
        assert!(got == expected, "{slots} slots");
        let (got, sometimes) = decode(Lookahead::Auto, slots, None);
        assert!(got == expected, "{slots} slots, by trial");
        assert!(sometimes.ahead_read <= with.ahead_read, "{sometimes:?}");
        assert_eq!(sometimes.ahead_read > 0, with.ahead_read > 0);
        assert_eq!((without.ahead_read, without.ahead_used), (0, 0));
        assert!(with.ahead_used <= with.ahead_read, "{with:?}");
        match slots {
            // With few slots most guesses do not fit.
            40 => {}
            400 => assert!(with.ahead_used > 0, "{with:?}"),
            _ => assert_eq!(with.ahead_read, 0, "nothing is left to read"),
        }
        assert_eq!(with.selected, without.selected);
    }
    // What nobody keeps until the next step is not read ahead of it.
    let (expected, _) = decode(Lookahead::Off, 400, Some(0));
    let (got, with) = decode(Lookahead::Always, 400, Some(0));
    assert!(got == expected && with.ahead_read == 0, "{with:?}");
}

#[test]
fn a_slow_and_unreliable_disk_gives_the_same_bytes() {
    let out = converted(&fixture("opt-pre-ln"));
    let selector = SelectorKind::Oracle;
    let reference = fingerprint(out.path(), &options(selector, Engine::Pool, 4)).unwrap();
    let slow = SlowDiskOptions {
        bytes_per_s: NonZeroU64::new(200_000_000),
        latency: Duration::from_micros(50),
        short_every: 3,
        busy_every: 5,
        ..SlowDiskOptions::default()
    };
    for engine in [Engine::Pool, Engine::Uring] {
        for depth in [1, 3, 64] {
            let mut options = options(selector, engine, depth);
            options.io.slow_disk = Some(slow.clone());
            let got = fingerprint(out.path(), &options).unwrap();
            assert!(got == reference, "{engine} x {depth}");
        }
    }
}

#[test]
fn a_broken_disk_is_an_error_that_names_the_place_and_a_good_one_goes_on() {
    let out = converted(&fixture("opt-pre-ln"));
    // Whichever file is asked for these bytes first.
    let places = FlashFolder::open(out.path(), IoOptions::default()).unwrap();
    let (_, records) = places.record_extent(1).unwrap();
    let broken = records.offset_bytes..records.offset_bytes + records.len_bytes;
    for engine in [Engine::Pool, Engine::Uring] {
        let mut options = options(SelectorKind::Dense, engine, 4);
        options.io.slow_disk = Some(SlowDiskOptions {
            broken_bytes: broken.clone(),
            ..SlowDiskOptions::default()
        });
        let error = fingerprint(out.path(), &options).unwrap_err().to_string();
        assert!(
            error.contains(".safetensors") && error.contains("at offset"),
            "{error}"
        );
    }
    let mut nobody = options(SelectorKind::Dense, Engine::Pool, 4);
    nobody.io.threads = 0;
    let error = fingerprint(out.path(), &nobody).unwrap_err().to_string();
    assert!(error.contains("1 to 1024 threads, got 0"), "{error}");
}

/// The FFNs of the demo model's first layers.
fn layers(selector: SelectorKind) -> (tempfile::TempDir, Vec<FlashMlp>, usize) {
    let out = demo();
    let folder = FlashFolder::open(out.path(), IoOptions::default()).unwrap();
    let layers = folder.manifest().layers.clone();
    let placement = Placement {
        slots_per_layer: vec![100; layers.len()],
        ..Placement::resident(&folder, selector)
    };
    let vb = FlashVarBuilder::new(&folder, placement);
    let load = |layer: &wick_format::FfnLayer| {
        let at = layer
            .prefix
            .split('.')
            .fold(vb.clone(), |vb, part| vb.pp(part));
        let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
        FlashMlp::load(hidden, ffn, Activation::Relu, at).unwrap()
    };
    let hidden = layers[0].hidden_size;
    (out, layers[..2].iter().map(load).collect(), hidden)
}

fn input(hidden: usize, tokens: usize, seed: f32) -> Tensor {
    let values = (0..tokens * hidden).map(|i| (seed + i as f32 * 0.37).sin());
    Tensor::from_vec(
        values.collect::<Vec<_>>(),
        (1, tokens, hidden),
        &Device::Cpu,
    )
    .unwrap()
}

fn bits(y: candle::Result<Tensor>) -> Vec<u32> {
    let y = y.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    y.into_iter().map(f32::to_bits).collect()
}

#[test]
fn what_has_begun_can_be_finished_dropped_or_interleaved() {
    let (_out, layers, hidden) = layers(SelectorKind::LowRank);
    let (first, second) = (&layers[0], &layers[1]);
    // 300 tokens are three steps; only the first of them begins early.
    for tokens in [1, 5, 300] {
        let x = input(hidden, tokens, 0.5);
        let [expected, expected_second] = [first, second].map(|mlp| bits(mlp.forward(&x)));
        assert_ne!(expected, expected_second);
        assert_eq!(bits(first.begin(&x).unwrap().finish()), expected);
        drop(first.begin(&input(hidden, tokens, 7.0)).unwrap());
        assert_eq!(bits(first.forward(&x)), expected);
        // Two layers at once.
        let tickets = [first, second].map(|mlp| mlp.begin(&x).unwrap());
        let [a, b] = tickets.map(|ticket| bits(ticket.finish()));
        assert_eq!((a, b), (expected.clone(), expected_second));
        // One layer twice at once is refused, and no harm is done.
        let ticket = first.begin(&x).unwrap();
        let error = first.forward(&x).unwrap_err().to_string();
        assert!(error.contains("one sequence at a time"), "{error}");
        assert!(first.begin(&x).is_err());
        assert_eq!(bits(ticket.finish()), expected);
        assert_eq!(bits(first.forward(&x)), expected);
    }
    assert!(first.begin(&input(hidden + 1, 1, 0.0)).is_err());
}
