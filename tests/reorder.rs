//! A model in another order of neurons is the same model, to the bit, and is written whole or not at all.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use candle::{DType, Device, Tensor};
use candle_transformers::models::llama;
use candle_wick::stock::{self, StockOptions};
use candle_wick::{
    CachePolicy, DirectIo, Engine, FlashFolder, FlashVarBuilder, IoOptions, Lookahead, Placement,
    SelectorKind, Switches, TraceMetadata, TraceRecorder,
};
use candle_wick_convert::reorder::{friends, reorder, ReorderOptions, ReorderReport};
use candle_wick_models::{record_trace, LoadOptions, WickTokenizer};
use tempfile::TempDir;
use tracing_subscriber::layer::SubscriberExt;
use wick_format::{crc32c, Manifest, TensorIndex};

use crate::demo::{assets, demo};
use crate::exactness::{fingerprint, with_slots};
use crate::support::{converted, expected, fixture};

const RECORDS: &str = "ffn-00001-of-00001.safetensors";

fn open(path: &Path) -> FlashFolder {
    FlashFolder::open(path, IoOptions::default()).unwrap()
}

/// Records a made-up trace: teams of neurons, far apart by number, that fire together in turns.
fn trace(model: &Path, to: &Path, tokens: usize, seed: usize) {
    let folder = open(model);
    let manifest = folder.manifest();
    let metadata = TraceMetadata {
        model_type: manifest.model_type.clone(),
        model_hash: manifest.neurons_hash().to_owned(),
        selector: "oracle".to_owned(),
        is_replayed: false,
        sequence_tokens: 64,
    };
    let widths: Vec<usize> = manifest
        .layers
        .iter()
        .map(|layer| layer.intermediate_size)
        .collect();
    let mut recorder = TraceRecorder::create(to, metadata, widths.iter().copied()).unwrap();
    for token in 0..tokens {
        for (layer, width) in widths.iter().enumerate() {
            let teams = width / 8;
            let team = (token * 5 + seed + layer) % teams;
            let neurons: Vec<u32> = (0..8)
                .map(|member| (member * teams + team) as u32)
                .collect();
            recorder.push(layer, &neurons);
        }
    }
    recorder.finish().unwrap();
}

/// A trace of `model`, and the model in an order made from it.
fn reordered(model: &Path, seed: usize) -> (TempDir, ReorderReport) {
    let place = tempfile::tempdir().unwrap();
    let trace_file = place.path().join("a.trace");
    trace(model, &trace_file, 400, seed);
    let options = ReorderOptions::default();
    let out = place.path().join("out");
    let report = reorder(&open(model), &trace_file, &out, &options, &|_| {}).unwrap();
    (place, report)
}

fn snapshot(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let read = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read(path).unwrap())
    };
    entries.map(read).collect()
}

/// The same bytes at these slots, ways of reading and selectors, and some neuron has moved.
fn same_bytes(name: &str, model: &Path, ids: &[u32], slots: &[usize], selectors: &[SelectorKind]) {
    let (place, _) = reordered(model, 3);
    let out = place.path().join("out");
    assert_ne!(
        open(&out).manifest().model_hash,
        open(model).manifest().model_hash
    );
    for &selector in selectors {
        let expected = fingerprint(&mut with_slots(&open(model), selector, usize::MAX), ids);
        for (direct, engine) in [
            (DirectIo::Preferred, Engine::Pool),
            (DirectIo::Off, Engine::Uring),
        ] {
            let io = IoOptions {
                direct,
                engine,
                threads: 4,
                ..IoOptions::default()
            };
            let folder = FlashFolder::open(&out, io).unwrap();
            for &slots in slots {
                let got = fingerprint(&mut with_slots(&folder, selector, slots), ids);
                let same = got == expected;
                assert!(same, "{name} {selector} {slots} slots {direct:?} {engine}");
            }
        }
    }
}

#[test]
fn a_reordered_model_gives_the_same_bytes() {
    let both = [SelectorKind::Dense, SelectorKind::Oracle];
    for (name, selectors) in [
        ("opt-pre-ln", &both[..]),
        ("llama-relu-gqa-f16", &both),
        ("llama-2-silu", &both[..1]),
        ("phi-2", &both[..1]),
        ("persimmon", &both),
    ] {
        let model = converted(&fixture(name));
        let ids = expected(name).ids;
        same_bytes(name, model.path(), &ids, &[5, 40, usize::MAX], selectors);
    }
    let ids = [1765, 352, 260, 2272, 2386, 13, 283, 261, 285, 336];
    let all = [
        SelectorKind::Dense,
        SelectorKind::Oracle,
        SelectorKind::LowRank,
    ];
    let slots = [256, 700, usize::MAX];
    same_bytes("opt-9m", demo().path(), &ids, &slots, &all);
}

/// Guesses, counts and places at once: none of them changes a result, and all of them had something to do.
#[test]
fn reading_ahead_under_lfu_from_a_reordered_folder_gives_the_same_bytes() {
    let model = demo();
    let (place, _) = reordered(model.path(), 6);
    let out = place.path().join("out");
    let ids: Vec<u32> = (0..60).map(|index| 100 + index * 37 % 900).collect();
    let decoded = |folder: &Path, cache_policy: CachePolicy, lookahead: Lookahead| {
        let options = LoadOptions {
            selector: Some(SelectorKind::LowRank),
            slots_per_layer: Some(400),
            cache_policy,
            switches: Switches {
                lookahead,
                ..Switches::default()
            },
            ..LoadOptions::default()
        };
        let mut model = candle_wick_models::load(folder, &options).unwrap();
        let logits: Vec<Vec<f32>> = ids
            .iter()
            .map(|id| model.forward(&[*id]).unwrap())
            .collect();
        let bits: Vec<u32> = logits
            .concat()
            .iter()
            .map(|logit| logit.to_bits())
            .collect();
        (bits, model.stats())
    };
    let (expected, plain) = decoded(model.path(), CachePolicy::Lru, Lookahead::Off);
    assert!(plain.misses > 0 && plain.ahead_read == 0, "{plain:?}");
    let (got, ahead) = decoded(&out, CachePolicy::Lfu, Lookahead::Always);
    assert!(ahead.ahead_used > 0, "{ahead:?}");
    assert!(got == expected);
}

#[test]
fn dense_tensors_and_stock_models_are_the_same() {
    let model = converted(&fixture("llama-relu-gqa-f16"));
    let (place, _) = reordered(model.path(), 1);
    let tensors = |path: &Path| {
        let folder = open(path);
        let layer = &folder.manifest().layers[1];
        let (ffn, hidden) = (layer.intermediate_size, layer.hidden_size);
        let placement = Placement::resident(&folder, SelectorKind::Dense);
        let vb = FlashVarBuilder::new(&folder, placement).dense();
        let names = [layer.gate.as_ref().unwrap(), &layer.up, &layer.down];
        let shapes = [(ffn, hidden), (ffn, hidden), (hidden, ffn)];
        let tensors = names.into_iter().zip(shapes);
        let tensors = tensors.map(|(name, shape)| vb.get(shape, name).unwrap());
        let values = tensors.map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        values.collect::<Vec<_>>()
    };
    let logits = |path: &Path| {
        let config = fs::read(path.join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        // Candle's own Llama knows no other activation, which changes nothing here.
        config["hidden_act"] = "silu".into();
        let config: llama::LlamaConfig = serde_json::from_value(config).unwrap();
        let config = config.into_config(false);
        let options = StockOptions::default();
        let build = |vb| llama::Llama::load(vb, &config);
        let (model, handle) = stock::load(path, &options, build).unwrap();
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
        let input = Tensor::new(&[[3u32, 1, 4, 1, 5]], &Device::Cpu).unwrap();
        let logits = handle
            .forward(|| model.forward(&input, 0, &mut cache))
            .unwrap();
        logits.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let out = place.path().join("out");
    assert_eq!(tensors(model.path()), tensors(&out));
    let subscriber = tracing_subscriber::registry().with(stock::layer());
    tracing::subscriber::with_default(subscriber, || {
        assert_eq!(logits(model.path()), logits(&out));
    });
}

#[test]
fn teams_lie_together_and_friends_are_found() {
    let model = converted(&fixture("opt-pre-ln"));
    let (place, report) = reordered(model.path(), 0);
    for layer in &report.layers {
        let [natural, .., taken] = [0, 1, 2, 3].map(|at| layer.costs[at].1.requests);
        assert!(natural > 4.0 * taken, "{layer:?}");
    }
    // Teams fire in turns: a neuron's friends are its team, each of the same 8.
    let found = friends(&place.path().join("a.trace"), 0.25).unwrap();
    for layer in &found.layers {
        assert_eq!(layer.together, [1.0, 1.0, 1.0, 0.0], "{layer:?}");
        assert_eq!(layer.distinct_friends, 2 * layer.neurons / 8, "{layer:?}");
    }
}

#[test]
fn an_order_can_be_made_anew() {
    let model = demo();
    let (first, _) = reordered(model.path(), 7);
    let trace_file = first.path().join("b.trace");
    trace(model.path(), &trace_file, 400, 31);
    let [once, twice] = ["once", "twice"].map(|name| first.path().join(name));
    let options = ReorderOptions::default();
    reorder(&open(model.path()), &trace_file, &once, &options, &|_| {}).unwrap();
    let before = first.path().join("out");
    reorder(&open(&before), &trace_file, &twice, &options, &|_| {}).unwrap();
    assert!(snapshot(&once) == snapshot(&twice));
    assert!(snapshot(&once) != snapshot(&before));
}

/// Changes the order of layer 0 and gives what loading says then.
fn with_order(out: &Path, change: impl Fn(&mut [u8]), fix_checksum: bool) -> String {
    let path = out.join(RECORDS);
    let good = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let index = TensorIndex::parse(&good[8..8 + header], good.len() as u64).unwrap();
    let manifest = Manifest::parse(&fs::read_to_string(out.join("wick.json")).unwrap()).unwrap();
    let extents = manifest.layers[0].order_extents(&index).unwrap();
    let (order, checksum) = extents.unwrap();
    let mut bad = good.clone();
    let start = order.offset_bytes as usize;
    let range = start..start + order.len_bytes as usize;
    change(&mut bad[range.clone()]);
    if fix_checksum {
        let crc32c = crc32c(&bad[range]).to_le_bytes();
        bad[checksum.offset_bytes as usize..][..4].copy_from_slice(&crc32c);
    }
    fs::write(&path, bad).unwrap();
    let options = LoadOptions::default();
    let said = candle_wick_models::load(out, &options)
        .err()
        .unwrap()
        .to_string();
    fs::write(&path, good).unwrap();
    said
}

#[test]
fn a_damaged_order_is_refused() {
    let model = converted(&fixture("opt-pre-ln"));
    let (place, _) = reordered(model.path(), 2);
    let out = place.path().join("out");
    let swap = |bytes: &mut [u8]| {
        let (first, second) = bytes.split_at_mut(4);
        first.swap_with_slice(&mut second[..4]);
    };
    let said = with_order(&out, swap, false);
    assert!(
        said.contains("neurons.order") && said.contains("crc32c"),
        "{said}"
    );
    let said = with_order(&out, |bytes| bytes.copy_within(0..4, 4), true);
    assert!(
        said.contains("neurons.order") && said.contains("records 0 and 1"),
        "{said}"
    );
    let said = with_order(&out, |bytes| bytes[..4].fill(0xff), true);
    assert!(said.contains("neuron 4294967295 in record 0"), "{said}");
}

fn wick(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    command.args(arguments).stdout(Stdio::null());
    command
}

#[test]
fn what_cannot_be_reordered_is_refused_in_one_sentence() {
    let (model, other) = (
        converted(&fixture("opt-pre-ln")),
        converted(&fixture("persimmon")),
    );
    let (place, _) = reordered(model.path(), 2);
    let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let [good, out, new] = ["a.trace", "out", "new"].map(path);
    let short = path("short.trace");
    trace(model.path(), short.as_ref(), 9, 0);
    fs::create_dir(path("full")).unwrap();
    fs::write(path("full/mine.txt"), "mine").unwrap();
    let text = |folder: &TempDir| folder.path().to_str().unwrap().to_owned();
    let inside = format!("{}/new", text(&model));
    for (arguments, part) in [
        ([&text(&other), &good, &new], "recorded of model"),
        (
            [&text(&model), &good, &out],
            "already holds a converted folder",
        ),
        ([&text(&model), &good, &path("full")], "mine.txt"),
        ([&text(&model), &good, &inside], "lies in the source"),
        ([&text(&model), &short, &new], "has 9 tokens"),
        ([&text(&model), &path("none"), &new], "none"),
        ([&good, &good, &new], "a.trace"),
    ] {
        let arguments = arguments.map(String::as_str);
        let said = wick(&[&["reorder"][..], &arguments].concat())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&said.stderr);
        assert_eq!(said.status.code(), Some(1), "{arguments:?}: {stderr}");
        assert!(stderr.contains(part), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(!Path::new(&new).exists(), "{arguments:?} left a folder");
    }
    for words in [
        &["reorder", &text(&model), &good, &new][..],
        &["friends", &good],
    ] {
        for (resident, part) in [("100%", "above 0 and below 1"), ("25", "at most 100%")] {
            let said = wick(&[words, &["--resident", resident]].concat())
                .output()
                .unwrap();
            let stderr = String::from_utf8_lossy(&said.stderr);
            assert!(!said.status.success() && stderr.contains(part), "{stderr}");
        }
    }
}

#[test]
fn a_killed_run_leaves_nothing_half_written_and_is_taken_up() {
    let model = demo();
    let (place, _) = reordered(model.path(), 4);
    let whole = snapshot(&place.path().join("out"));
    let [out, trace] = ["again", "a.trace"].map(|name| place.path().join(name));
    let paths = [model.path(), &trace, &out].map(|path| path.to_str().unwrap());
    let arguments = ["reorder", paths[0], paths[1], paths[2], "--quiet"];
    let started = Instant::now();
    assert!(wick(&arguments).status().unwrap().success());
    let duration = started.elapsed();
    assert!(snapshot(&out) == whole);
    let mut killed = 0;
    for step in 1..=12 {
        fs::remove_dir_all(&out).unwrap();
        let mut child = wick(&arguments).spawn().unwrap();
        std::thread::sleep(
            duration
                .mul_f64(f64::from(step) / 13.0)
                .max(Duration::from_millis(1)),
        );
        child.kill().unwrap();
        if !child.wait().unwrap().success() {
            killed += 1;
            if out.join("wick.json").exists() {
                // Killed behind the last file: complete, but for the note that it was being written.
                let mut left = snapshot(&out);
                left.retain(|name, _| !name.starts_with('.'));
                assert!(left == whole, "looks finished");
                continue;
            }
            let known = |name: &String| name.starts_with('.') || whole.contains_key(name);
            if out.exists() {
                let left = snapshot(&out);
                assert!(left.keys().all(known), "{:?}", left.keys());
                let finished = left.iter().filter(|(name, _)| !name.starts_with('.'));
                assert!(finished
                    .into_iter()
                    .all(|(name, bytes)| whole[name] == *bytes));
            }
            assert!(wick(&arguments).status().unwrap().success(), "a rerun");
        }
        assert!(snapshot(&out) == whole, "a rerun gave other bytes");
    }
    assert!(killed > 0, "12 runs of {duration:?}, none killed");
}

/// What decoding `ids` token by token reads with `slots` slots a layer, once warm: requests, KiB and ms a token.
fn reads(folder: &FlashFolder, ids: &[u32], slots: usize) -> [f64; 3] {
    let mut model = with_slots(folder, SelectorKind::LowRank, slots);
    let (warm, counted) = ids.split_at(ids.len() / 3);
    for id in warm {
        model.forward(&[*id]).unwrap();
    }
    let (before, started) = (folder.io_counters(), Instant::now());
    for id in counted {
        model.forward(&[*id]).unwrap();
    }
    let (after, ms) = (folder.io_counters(), started.elapsed().as_secs_f64() * 1e3);
    let requests = (after.requests - before.requests) as f64;
    let kib = (after.bytes - before.bytes) as f64 / 1024.0;
    [requests, kib, ms].map(|sum| sum / counted.len() as f64)
}

/// One says it all of requests and bytes; the times in docs/bench/order.md are the best of five.
const TURNS: usize = 1;

/// The figures of docs/bench/order.md.
#[test]
fn an_order_from_one_text_saves_requests_on_another() {
    let model = demo();
    let tokenizer = WickTokenizer::load(model.path()).unwrap().unwrap();
    let ids = |name: &str, count: usize| {
        let text = fs::read_to_string(assets().join(name)).unwrap();
        let start: String = text.chars().take(8 * count).collect();
        let ids = tokenizer.encode(&start).unwrap();
        ids[..count].to_vec()
    };
    let place = tempfile::tempdir().unwrap();
    let [recorded, out] = ["a.trace", "out"].map(|name| place.path().join(name));
    let mut recording = with_slots(&open(model.path()), SelectorKind::LowRank, usize::MAX);
    let calibration = ids("calibration.txt", 6000);
    record_trace(&mut recording, &calibration, &recorded, &|_| {}).unwrap();
    let (natural, heldout) = (open(model.path()), ids("heldout.txt", 240));
    println!("slots  natural: requests KiB ms a token   ordered: requests KiB ms a token");
    for slots in [256, 512, 820, 1228] {
        let out = out.with_extension(slots.to_string());
        let resident = slots as f64 / 2048.0;
        let options = ReorderOptions { resident };
        reorder(&natural, &recorded, &out, &options, &|_| {}).unwrap();
        let ordered = open(&out);
        let mut best = [[f64::MAX; 3]; 2];
        for _ in 0..TURNS {
            for (best, folder) in best.iter_mut().zip([&natural, &ordered]) {
                let got = reads(folder, &heldout, slots);
                *best = std::array::from_fn(|at| best[at].min(got[at]));
            }
        }
        println!("{slots:>5}  {:>8.1?}  {:>8.1?}", best[0], best[1]);
        // A request weighs as much as some 14 KiB. With few slots the first layer streams, in passes by number.
        let weights = best.map(|[requests, kib, _]| kib + 14.0 * requests);
        assert!(weights[1] < weights[0], "{best:?}");
        if slots >= 820 {
            assert!(best[1][0] < 0.85 * best[0][0], "requests {best:?}");
            assert!(best[1][1] < 0.9 * best[0][1], "bytes {best:?}");
        }
    }
}
