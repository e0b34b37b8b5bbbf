//! `dip` and `dip-ca`: what they keep is what the paper says, whatever is in memory; and layers by columns.

use candle::{Device, Module, Tensor};
use candle_wick::{
    Activation, CachePolicy, DipOptions, FlashFolder, FlashLinear, FlashMlp, FlashVarBuilder,
    IoOptions, Memory, Placement, SelectorKind,
};
use candle_wick_convert::Layout;
use candle_wick_models::{score_continuations, Continuation, LoadOptions, LoadedModel};
use tempfile::TempDir;

use crate::exactness::fingerprint;
use crate::support::{converted_to, expected, fixture, largest, ConvertArgs};

mod layer;

const LLAMA: &str = "llama-2-silu";
/// Models whose FFN has no gate.
const UNGATED: [&str; 3] = ["phi-2", "opt-gelu-own-head", "falcon-rw-alibi"];

fn by_columns(name: &str) -> TempDir {
    converted_to(&fixture(name), &ConvertArgs::default(), Layout::Channel)
}

fn open(folder: &TempDir) -> FlashFolder {
    FlashFolder::open(folder.path(), IoOptions::default()).unwrap()
}

fn dip(density: f64, gamma: f64) -> DipOptions {
    DipOptions {
        density,
        gamma,
        dense_prompt: false,
    }
}

fn load(
    folder: &FlashFolder,
    selector: SelectorKind,
    dip: DipOptions,
    slots: Option<usize>,
) -> LoadedModel {
    let options = LoadOptions {
        selector: Some(selector),
        dip,
        slots_per_layer: slots,
        ..LoadOptions::default()
    };
    LoadedModel::load(folder.clone(), &options).unwrap()
}

/// Bits of logits along the fixture's ids and of what follows.
fn bits(name: &str, model: &mut LoadedModel) -> Vec<u32> {
    fingerprint(model, &expected(name).ids)
}

#[test]
fn a_density_of_one_is_dense_to_the_bit() {
    for name in [&[LLAMA][..], &UNGATED].concat() {
        let out = by_columns(name);
        let folder = open(&out);
        let all = dip(1.0, 0.2);
        let dense = bits(name, &mut load(&folder, SelectorKind::Dense, all, None));
        for selector in [SelectorKind::Dip, SelectorKind::DipCa] {
            for slots in [None, Some(9)] {
                let got = bits(name, &mut load(&folder, selector, all, slots));
                assert!(got == dense, "{name} {selector} {slots:?}");
            }
        }
    }
}

#[test]
fn what_is_in_memory_never_changes_dip() {
    for name in [LLAMA, UNGATED[0]] {
        let out = by_columns(name);
        let folder = open(&out);
        for density in [0.2, 0.65] {
            let options = dip(density, 0.2);
            let reference = bits(name, &mut load(&folder, SelectorKind::Dip, options, None));
            for (slots, cache_policy, window_tokens, threads) in [
                (2, CachePolicy::Lfu, None, 2),
                (7, CachePolicy::Lru, None, 1),
                (23, CachePolicy::Lfu, None, 3),
                (60, CachePolicy::Lru, Some(2), 1),
                (60, CachePolicy::Lfu, Some(0), 3),
                (90, CachePolicy::Lfu, None, 1),
            ] {
                let load_options = LoadOptions {
                    selector: Some(SelectorKind::Dip),
                    dip: options,
                    slots_per_layer: Some(slots),
                    cache_policy,
                    window_tokens,
                    ..LoadOptions::default()
                };
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                let run = || {
                    let model = LoadedModel::load(folder.clone(), &load_options);
                    bits(name, &mut model.unwrap())
                };
                let got = pool.build().unwrap().install(run);
                let case = format!("{name} {density} {slots} {cache_policy} {window_tokens:?}");
                assert!(got == reference, "{case} {threads} threads");
            }
            let dense = bits(name, &mut load(&folder, SelectorKind::Dense, options, None));
            assert!(dense != reference, "{name}: something is left out");
        }
    }
}

#[test]
fn a_gamma_of_one_is_dip_and_a_smaller_one_reads_less() {
    let out = by_columns(LLAMA);
    let folder = open(&out);
    let run = |selector, gamma, slots| {
        let mut model = load(&folder, selector, dip(0.4, gamma), Some(slots));
        let bits = bits(LLAMA, &mut model);
        (bits, model.stats())
    };
    let slots = 40;
    let (plain, _) = run(SelectorKind::Dip, 0.2, slots);
    // Token by token, as every dip-ca: the union of a prompt would be read once.
    let (gamma_one, plain_stats) = run(SelectorKind::DipCa, 1.0, slots);
    assert!(gamma_one == plain);
    let (aware, aware_stats) = run(SelectorKind::DipCa, 0.1, slots);
    assert!(aware != plain, "the cache has a say");
    assert_eq!(aware_stats.selected, plain_stats.selected);
    assert!(
        aware_stats.bytes_read < plain_stats.bytes_read,
        "{aware_stats:?} {plain_stats:?}"
    );
    let everything = folder.manifest().layers[0].intermediate_size;
    let (resident, stats) = run(SelectorKind::DipCa, 0.1, everything);
    assert!(
        resident == plain,
        "with everything in memory nothing is preferred"
    );
    assert_eq!(stats.misses, 0);
}

/// The choice depends on what is in memory, and so on the sequence alone.
#[test]
fn a_sequence_again_gives_the_same_numbers_with_dip_ca() {
    let out = by_columns(LLAMA);
    let ids = expected(LLAMA).ids;
    let everything = open(&out).manifest().layers[0].intermediate_size;
    for (slots, cache_policy, window_tokens) in [
        (40, CachePolicy::Lfu, None),
        (40, CachePolicy::Lru, None),
        (40, CachePolicy::Lfu, Some(2)),
        (everything, CachePolicy::Lru, Some(1)),
    ] {
        let options = LoadOptions {
            selector: Some(SelectorKind::DipCa),
            dip: dip(0.4, 0.1),
            slots_per_layer: Some(slots),
            cache_policy,
            window_tokens,
            ..LoadOptions::default()
        };
        let mut model = LoadedModel::load(open(&out), &options).unwrap();
        let case = format!("{slots} {cache_policy} {window_tokens:?}");
        let first = model.forward(&ids).unwrap();
        assert_ne!(model.forward(&ids[..3]).unwrap(), first, "{case}");
        model.reset();
        assert_eq!(model.forward(&ids).unwrap(), first, "{case}");
    }
}

/// A cold cache has nothing to prefer, whatever gamma is.
#[test]
fn the_first_token_of_a_sequence_is_that_of_dip() {
    let out = by_columns(LLAMA);
    let folder = open(&out);
    let first = |selector, gamma| {
        let mut model = load(&folder, selector, dip(0.4, gamma), Some(40));
        model.forward(&[7]).unwrap()
    };
    let plain = first(SelectorKind::Dip, 0.2);
    for gamma in [0.0, 0.2, 1.0] {
        assert_eq!(first(SelectorKind::DipCa, gamma), plain, "{gamma}");
    }
}

/// Each choice of a task is scored as if it were alone, also where memory has a say.
#[test]
fn the_order_of_choices_does_not_count() {
    let out = by_columns(LLAMA);
    let ids = expected(LLAMA).ids;
    let choice = |last: &[u32]| Continuation::new([&ids[..6], last].concat(), 6).unwrap();
    let choices = [choice(&[3, 9]), choice(&[11]), choice(&[5, 2, 8])];
    for dense_prompt in [false, true] {
        let options = DipOptions {
            dense_prompt,
            ..dip(0.4, 0.1)
        };
        let mut model = load(&open(&out), SelectorKind::DipCa, options, Some(40));
        let scores = score_continuations(&mut model, &choices).unwrap();
        for (choice, score) in choices.iter().zip(scores) {
            let alone = score_continuations(&mut model, std::slice::from_ref(choice)).unwrap();
            assert_eq!(alone, [score], "{dense_prompt}");
        }
    }
}

#[test]
fn what_is_selected_is_the_density() {
    for (name, density) in [(LLAMA, 0.5), (LLAMA, 0.8), ("phi-2", 0.5)] {
        let out = by_columns(name);
        let mut model = load(&open(&out), SelectorKind::Dip, dip(density, 0.2), None);
        model.forward(&expected(name).ids).unwrap();
        let got = model.stats().selected_fraction();
        // Counts are whole numbers, rounded down.
        assert!(got <= density && got > density - 0.03, "{name} {got}");
    }
}

#[test]
fn a_dense_prompt_keeps_everything_and_the_next_token_does_not() {
    let out = by_columns(LLAMA);
    let folder = open(&out);
    let ids = expected(LLAMA).ids;
    let mut dense = load(&folder, SelectorKind::Dense, dip(0.3, 0.2), None);
    for selector in [SelectorKind::Dip, SelectorKind::DipCa] {
        let options = DipOptions {
            dense_prompt: true,
            ..dip(0.3, 0.2)
        };
        let mut model = load(&folder, selector, options, Some(30));
        dense.reset();
        assert_eq!(model.forward(&ids).unwrap(), dense.forward(&ids).unwrap());
        assert_ne!(model.forward(&[3]).unwrap(), dense.forward(&[3]).unwrap());
    }
}

fn difference(a: &Tensor, b: &Tensor) -> f32 {
    let gap = (a - b).unwrap().abs().unwrap();
    gap.max_all().unwrap().to_scalar().unwrap()
}

/// Every linear layer of a block, by columns where its weight is stored so, beside candle's.
#[test]
fn linears_are_candles_and_selected_inputs_are_the_others_at_zero() {
    let layout_of = |layout| converted_to(&fixture(LLAMA), &ConvertArgs::default(), layout);
    for (out, slots) in [
        (layout_of(Layout::Channel), 1000),
        (layout_of(Layout::Channel), 6),
        (layout_of(Layout::Both), 17),
    ] {
        let folder = open(&out);
        let layer = folder.manifest().layers[1].clone();
        let (hidden, ffn) = (layer.hidden_size, layer.intermediate_size);
        let placement = Placement {
            slots_per_layer: vec![slots; 3],
            channel_slots_per_layer: vec![slots; 3],
            ..Placement::resident(&folder, SelectorKind::Dip)
        };
        let vb = FlashVarBuilder::new(&folder, placement);
        for (name, in_dim, out_dim) in [
            ("mlp.gate_proj", hidden, ffn),
            ("mlp.up_proj", hidden, ffn),
            ("mlp.down_proj", ffn, hidden),
            ("self_attn.o_proj", hidden, hidden),
        ] {
            let path = format!("model.layers.1.{name}");
            let ours = FlashLinear::load(in_dim, out_dim, vb.pp(&path)).unwrap();
            let dense = vb.dense();
            let theirs = candle_nn::linear_no_bias(in_dim, out_dim, dense.pp(&path)).unwrap();
            // More tokens than a step has.
            let x = (0..150 * in_dim).map(|i| (i as f32 * 0.37).sin());
            let x = Tensor::from_iter(x, &Device::Cpu).unwrap();
            let x = x.reshape((1, 150, in_dim)).unwrap();
            let (got, expected) = (ours.forward(&x).unwrap(), theirs.forward(&x).unwrap());
            assert!(difference(&got, &expected) < 1e-4, "{name} {slots}");
            let ids: Vec<u32> = (0..in_dim as u32).filter(|id| id % 3 == 1).collect();
            let mask = (0..in_dim).map(|id| f32::from(u8::from(id % 3 == 1)));
            let mask = Tensor::from_iter(mask, &Device::Cpu).unwrap();
            let got = ours.forward_selected(&x, &ids).unwrap();
            let masked = x.broadcast_mul(&mask).unwrap();
            let expected = theirs.forward(&masked).unwrap();
            assert_eq!(got.dims(), [1, 150, out_dim]);
            assert!(difference(&got, &expected) < 1e-4, "{name} {slots}");
            // One by one, and a second time: the same bits.
            let one = x.narrow(1, 149, 1).unwrap();
            let one = ours.forward_selected(&one, &ids).unwrap();
            assert_eq!(difference(&one, &got.narrow(1, 149, 1).unwrap()), 0.0);
            let none = ours.forward_selected(&x, &[]).unwrap();
            assert_eq!(difference(&none, &none.zeros_like().unwrap()), 0.0);
            for wrong in [&[1, 1][..], &[2, 1], &[in_dim as u32]] {
                let error = ours.forward_selected(&x, wrong).unwrap_err().to_string();
                assert!(error.contains("ascending"), "{error}");
            }
            assert!(FlashLinear::load(in_dim + 1, out_dim, vb.pp(&path)).is_err());
        }
    }
}

/// All of the weights and a part of them, with the two caches counted.
#[test]
fn budgets_count_both_caches() {
    let out = by_columns(LLAMA);
    let folder = open(&out);
    let plan = |memory, selector| {
        let options = LoadOptions {
            selector: Some(selector),
            memory,
            ..LoadOptions::default()
        };
        candle_wick_models::plan(&folder, &options).unwrap()
    };
    let all = plan(None, SelectorKind::Dip);
    let layer = &folder.manifest().layers[0];
    assert_eq!(all.slots_per_layer, vec![layer.intermediate_size; 3]);
    assert_eq!(all.channel_slots_per_layer, vec![layer.hidden_size; 3]);
    let bytes = |plan: &candle_wick::BudgetPlan| {
        let line = plan.lines.iter().find(|line| line.label == "slots");
        line.unwrap().bytes
    };
    let strides = layer.column_strides.unwrap();
    let whole =
        layer.hidden_size * strides.channel_bytes + layer.intermediate_size * strides.down_bytes;
    assert_eq!(bytes(&all), 3 * whole as u64);
    assert!(all.to_string().contains("channel slots per layer"), "{all}");
    let dense = plan(None, SelectorKind::Dense);
    assert_eq!(
        bytes(&dense),
        bytes(&all),
        "dense goes by columns here, too"
    );
    let part = plan(Some(Memory::Percent(60.0)), SelectorKind::Dip);
    assert!(part.weight_bytes as f64 <= 0.6 * part.dense_weight_bytes as f64);
    assert!(part.slots_per_layer[0] < layer.intermediate_size && part.slots_per_layer[0] >= 64);
}

#[test]
fn what_a_folder_does_not_have_is_named() {
    let by_neuron = converted_to(&fixture(LLAMA), &ConvertArgs::default(), Layout::Neuron);
    let by_column = converted_to(
        &fixture("opt-pre-ln"),
        &ConvertArgs::default(),
        Layout::Channel,
    );
    for (out, selector, named) in [
        (&by_neuron, SelectorKind::Dip, "--layout channel or both"),
        (&by_neuron, SelectorKind::DipCa, "--layout channel or both"),
        (&by_column, SelectorKind::Oracle, "--layout neuron or both"),
    ] {
        let options = LoadOptions {
            selector: Some(selector),
            ..LoadOptions::default()
        };
        let error = LoadedModel::load(open(out), &options).err().unwrap();
        let error = error.to_string();
        assert!(error.contains(named) && !error.contains('\n'), "{error}");
    }
    let options = LoadOptions {
        selector: Some(SelectorKind::Dip),
        dip: dip(1.2, 0.2),
        ..LoadOptions::default()
    };
    let error = LoadedModel::load(open(&by_column), &options).err().unwrap();
    assert!(error.to_string().contains("density is 1.2"), "{error}");
}

/// A bit of a column that flipped is seen when it is read, and what was to be read with it is not resident afterwards.
#[test]
fn a_damaged_column_is_seen_again_and_again() {
    let out = by_columns(LLAMA);
    let folder = open(&out);
    let (file, extent) = folder.record_extent(0).unwrap();
    let path = file.path().to_owned();
    let good = std::fs::read(&path).unwrap();
    let stride = extent.shape[1];
    let at = extent.offset_bytes as usize + 5 * stride + 3;
    drop(folder);
    let mut bad = good.clone();
    bad[at] ^= 4;
    std::fs::write(&path, bad).unwrap();
    let mut model = load(&open(&out), SelectorKind::Dip, dip(1.0, 0.2), Some(30));
    for _ in 0..2 {
        let error = model.forward(&[1, 7]).unwrap_err().to_string();
        assert!(
            error.contains("crc32c") || error.contains("checksum"),
            "{error}"
        );
    }
    std::fs::write(&path, good).unwrap();
    let healed = model.forward(&[1, 7]).unwrap();
    let mut sound = load(&open(&out), SelectorKind::Dip, dip(1.0, 0.2), None);
    assert_eq!(healed, sound.forward(&[1, 7]).unwrap());
}
