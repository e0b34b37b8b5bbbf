//! Files of predictors that lie, are damaged, or are for something else: one sentence with the file, the tensor and the
//! number, and never a wrong answer.

use candle_wick::{Error, FlashFolder, IoOptions, Result, SelectorKind};
use candle_wick_models::{LoadOptions, LoadedModel};
use half::f16;
use wick_format::StoredDtype;
use wick_kernels::PackedBits;

use super::file::PredictorTensors;
use super::{selector, Case};
use crate::exactness::with_slots;

type Lie = fn(&mut PredictorTensors);

/// Changes the metadata.
fn say(file: &mut PredictorTensors, key: &str, value: &str) {
    file.metadata.insert(key.to_owned(), value.to_owned());
}

/// Overwrites bytes of a tensor, whose checksum will be right.
fn poke(file: &mut PredictorTensors, part: &str, at: usize, bytes: &[u8]) {
    file.tensor(part).1[at..at + bytes.len()].copy_from_slice(bytes);
}

fn remove(file: &mut PredictorTensors, part: &str) {
    file.tensors.retain(|(spec, _)| !spec.name.ends_with(part));
}

fn reshape(file: &mut PredictorTensors, part: &str, shape: &[usize]) {
    file.retype(part, None, shape);
}

fn retype(file: &mut PredictorTensors, part: &str, dtype: StoredDtype) {
    let shape = file.tensor(part).0.shape.clone();
    file.retype(part, Some(dtype), &shape);
}

/// Lies about the quantised gate of a layer of 256 neurons with 64 inputs, and words of the sentence.
const GATES: [(Lie, &[&str]); 17] = [
    (
        |file| say(file, "form", "gates"),
        &["\"gates\"", "lowrank, gate"],
    ),
    (
        |file| say(file, "input", "hidden"),
        &["\"hidden\"", "attention_residual"],
    ),
    (
        |file| say(file, "between", "gelu"),
        &["\"gelu\"", "none, relu"],
    ),
    (|file| say(file, "between", "relu"), &["form gate", "relu"]),
    (
        |file| say(file, "model_hash", "0123456789abcdef"),
        &["0123456789abcdef"],
    ),
    (
        |file| say(file, "thresholds", "0 NaN 0"),
        &["thresholds", "NaN"],
    ),
    (
        |file| say(file, "thresholds", "0 0"),
        &["thresholds", "3 layers"],
    ),
    (|file| say(file, "form", "lowrank"), &["down.weight"]),
    (
        |file| remove(file, "0.predictor.gate.weight"),
        &["gate.weight"],
    ),
    (
        |file| remove(file, "0.predictor.gate.scale"),
        &["gate.scale"],
    ),
    (|file| remove(file, "0.predictor.gate.bias"), &["gate.bias"]),
    (
        |file| reshape(file, "gate.weight", &[256, 24]),
        &[
            "gate.weight",
            "[256, 24]",
            "[256, 8], [256, 16] or [256, 32]",
        ],
    ),
    (
        |file| reshape(file, "gate.weight", &[255, 16]),
        &["[255, 16]"],
    ),
    (
        |file| retype(file, "gate.weight", StoredDtype::I8),
        &["I8 [256, 16]"],
    ),
    (
        |file| reshape(file, "gate.scale", &[256, 2]),
        &["F16 [256, 2]", "[256, 1]"],
    ),
    (
        |file| poke(file, "gate.scale", 14, &f16::NAN.to_le_bytes()),
        &["gate.scale", "scale 0 of neuron 7"],
    ),
    (
        |file| poke(file, "gate.bias", 12, &f32::INFINITY.to_le_bytes()),
        &["gate.bias", "value 3 is inf"],
    ),
];

/// Lies about a low-rank pair of whole numbers.
const PAIRS: [(Lie, &[&str]); 9] = [
    (|file| say(file, "form", "gate"), &["gate.weight"]),
    (
        |file| retype(file, "up.weight", StoredDtype::F16),
        &["up.weight", "F16", "up.scale", "I8"],
    ),
    (
        |file| reshape(file, "down.weight", &[8, 32]),
        &["down.weight", "[8, 32]", "[8, 64]"],
    ),
    (
        |file| reshape(file, "up.weight", &[256, 4]),
        &["up.weight", "[256, 4]", "[256, 8]"],
    ),
    (
        |file| reshape(file, "down.scale", &[7]),
        &["down.scale", "[7]", "F32 [8]"],
    ),
    (
        |file| {
            reshape(file, "down.weight", &[0, 64]);
            reshape(file, "down.scale", &[0]);
            reshape(file, "up.weight", &[256, 0]);
        },
        &["down.weight", "rank 0"],
    ),
    (
        |file| poke(file, "down.scale", 8, &f32::NAN.to_le_bytes()),
        &["down.scale", "value 2 is NaN"],
    ),
    (
        |file| poke(file, "up.scale", 4, &f32::INFINITY.to_le_bytes()),
        &["up.scale", "value 1 is inf"],
    ),
    (
        |file| poke(file, "up.bias", 1020, &f32::NAN.to_le_bytes()),
        &["up.bias", "value 255 is NaN"],
    ),
];

/// Loads the model with what the file says it is.
fn load(folder: Result<FlashFolder>) -> std::result::Result<LoadedModel, String> {
    let folder = folder.map_err(|error| error.to_string())?;
    let options = LoadOptions::default();
    // Behind the sentence there may be a backtrace.
    let sentence = |error: String| error.lines().next().unwrap_or_default().to_owned();
    LoadedModel::load(folder, &options).map_err(|error| sentence(error.to_string()))
}

#[test]
fn every_lie_is_called_one() {
    let case = Case::of("opt-pre-ln");
    let folder = case.open();
    let gate = PredictorTensors::gate(&folder, "ffn_input", PackedBits::Two);
    let pair = PredictorTensors::low_rank(&folder, "ffn_input", "none", StoredDtype::I8);
    let lies = GATES.iter().map(|lie| (&gate, lie));
    for (honest, (lie, words)) in lies.chain(PAIRS.iter().map(|lie| (&pair, lie))) {
        load(case.with(honest)).unwrap();
        let mut file = honest.clone();
        lie(&mut file);
        let error = load(case.with(&file))
            .err()
            .unwrap_or_else(|| panic!("{words:?} was believed"));
        assert!(
            words.iter().all(|word| error.contains(word)),
            "{words:?}: {error}"
        );
    }
}

const DTYPES: [StoredDtype; 6] = [
    StoredDtype::F32,
    StoredDtype::F16,
    StoredDtype::Bf16,
    StoredDtype::I8,
    StoredDtype::U8,
    StoredDtype::U32,
];
const FLOATS: [StoredDtype; 3] = [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16];

/// A file of each form, and its parts.
fn forms(folder: &FlashFolder) -> [(PredictorTensors, Vec<String>); 3] {
    let pair = |dtype| PredictorTensors::low_rank(folder, "ffn_input", "relu", dtype);
    [
        PredictorTensors::gate(folder, "ffn_input", PackedBits::Four),
        pair(StoredDtype::F16),
        pair(StoredDtype::I8),
    ]
    .map(|file| {
        let names = file.tensors.iter().filter_map(|(spec, _)| {
            let name = spec.name.strip_prefix("model.decoder.layers.1.")?;
            Some(name.trim_start_matches("predictor.").to_owned())
        });
        let names = names.collect();
        (file, names)
    })
}

/// Every tensor of every form, missing, in every other dtype and in other shapes: the file and the tensor are named.
#[test]
fn each_tensor_is_what_the_format_says_or_refused() {
    let case = Case::of("opt-pre-ln");
    let (mut refusals, mut loaded) = (0, 0);
    for (honest, parts) in forms(&case.open()) {
        assert!(parts.len() >= 3, "{parts:?}");
        for part in &parts {
            let mut refused = |lie: &dyn Fn(&mut PredictorTensors), what: &str| {
                let mut file = honest.clone();
                lie(&mut file);
                let error = load(case.with(&file)).err();
                let error = error.unwrap_or_else(|| panic!("{part} {what} was believed"));
                for word in ["other.safetensors", ".predictor."] {
                    assert!(error.contains(word), "{part} {what}: {error}");
                }
                refusals += 1;
            };
            refused(&|file| remove(file, part), "missing");
            let spec = honest.clone().tensor(part).0.clone();
            let is_float_matrix = part.ends_with("weight") && FLOATS.contains(&spec.dtype);
            for dtype in DTYPES.into_iter().filter(|dtype| *dtype != spec.dtype) {
                let lie = |file: &mut PredictorTensors| retype(file, part, dtype);
                if is_float_matrix && FLOATS.contains(&dtype) {
                    let mut file = honest.clone();
                    lie(&mut file);
                    load(case.with(&file)).unwrap();
                    loaded += 1;
                } else {
                    refused(&lie, &dtype.to_string());
                }
            }
            let (rows, rest) = spec.shape.split_first().unwrap();
            let with_rows = |rows| [&[rows][..], rest].concat();
            let shapes = [
                with_rows(rows - 1),
                with_rows(rows + 1),
                with_rows(0),
                [&spec.shape[..], &[1]].concat(),
                [&[1], &spec.shape[..]].concat(),
                Vec::new(),
            ];
            for shape in shapes {
                let lie = |file: &mut PredictorTensors| reshape(file, part, &shape);
                refused(&lie, &format!("{shape:?}"));
            }
        }
    }
    assert_eq!((refusals, loaded), (REFUSALS, 2 * 2));
}

/// 3 tensors of a gate, 3 of a pair of floats, 5 of one of whole numbers: missing, 5 other dtypes, 6 other shapes; but
/// for the two float matrices, which may have two other dtypes.
const REFUSALS: usize = (3 + 3 + 5) * (1 + 5 + 6) - 2 * 2;

#[test]
fn each_list_has_a_number_a_layer_and_no_nan() {
    let case = Case::of("opt-pre-ln");
    let mut honest =
        PredictorTensors::low_rank(&case.open(), "ffn_input", "none", StoredDtype::F32);
    for key in ["union_by_window", "fresh_by_window"] {
        say(&mut honest, key, &["0.5"; 27].join(" "));
    }
    load(case.with(&honest)).unwrap();
    let lists = [
        ("thresholds", 3),
        ("recall", 3),
        ("selected_fraction", 3),
        ("union_fraction", 3),
        ("union_by_window", 27),
        ("fresh_by_window", 27),
    ];
    for (key, count) in lists {
        let numbers = |count: usize| vec!["0.5"; count].join(" ");
        let wrong = [
            String::new(),
            numbers(count - 1),
            numbers(count + 1),
            numbers(count - 1) + " NaN",
            numbers(count - 1) + " half",
        ];
        for text in wrong {
            let mut file = honest.clone();
            say(&mut file, key, &text);
            let error = load(case.with(&file)).err();
            let error = error.unwrap_or_else(|| panic!("{key} {text:?} was believed"));
            assert!(error.contains("other.safetensors"), "{error}");
            assert!(error.contains(&format!("\"{key}\"")), "{error}");
        }
        // A threshold is any number.
        let shares = ["-0.1", "1.5", "inf"];
        for share in shares.iter().filter(|_| key != "thresholds") {
            let mut file = honest.clone();
            say(&mut file, key, &(numbers(count - 1) + " " + share));
            let error = load(case.with(&file)).err().unwrap();
            assert!(error.contains("no share"), "{key} {share}: {error}");
        }
        let mut file = honest.clone();
        file.metadata.remove(key).unwrap();
        let error = load(case.with(&file)).err().unwrap();
        assert!(error.contains(&format!("lacks \"{key}\"")), "{error}");
    }
}

#[test]
fn predictors_of_another_width_are_refused_by_their_tensors() {
    let (small, large) = (Case::of("phi-relu"), Case::of("opt-pre-ln"));
    let hash = large.open().manifest().neurons_hash().to_owned();
    let mut file = PredictorTensors::gate(&small.open(), "ffn_input", PackedBits::One);
    let error = load(large.with(&file)).err().unwrap();
    assert!(error.contains("made for model"), "{error}");
    // One that says it is for this model, and has names of another.
    say(&mut file, "model_hash", &hash);
    for key in [
        "thresholds",
        "recall",
        "selected_fraction",
        "union_fraction",
    ] {
        say(&mut file, key, "0 0 0");
    }
    let error = load(large.with(&file)).err().unwrap();
    assert!(error.contains("gate.weight"), "{error}");
}

#[test]
fn a_selector_of_the_other_form_is_refused_and_the_default_is_what_there_is() {
    let case = Case::of("llama-relu-gqa-f16");
    let folder = case.open();
    let gate = PredictorTensors::gate(&folder, "ffn_input", PackedBits::Four);
    let pair = PredictorTensors::low_rank(&folder, "ffn_input", "relu", StoredDtype::F16);
    for (file, own, other) in [
        (gate, SelectorKind::Gate, SelectorKind::LowRank),
        (pair, SelectorKind::LowRank, SelectorKind::Gate),
    ] {
        let folder = case.with(&file).unwrap();
        assert_eq!(selector(&folder), own);
        let model = LoadedModel::load(folder.clone(), &LoadOptions::default()).unwrap();
        assert_eq!(model.plan().selector, own);
        let line = model
            .plan()
            .lines
            .iter()
            .find(|line| line.label == "predictors");
        let tensors = file.tensors.iter().map(|(_, bytes)| bytes.len() as u64);
        assert_eq!(line.unwrap().bytes, tensors.sum::<u64>());
        let options = LoadOptions {
            selector: Some(other),
            ..LoadOptions::default()
        };
        let error = LoadedModel::load(folder, &options)
            .err()
            .unwrap()
            .to_string();
        let words = [other.name(), own.name(), "other.safetensors"];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    // The folder has none of its own.
    for (selector, command) in [(SelectorKind::Gate, "gate"), (SelectorKind::LowRank, "fit")] {
        let options = LoadOptions {
            selector: Some(selector),
            ..LoadOptions::default()
        };
        let error = LoadedModel::load(folder.clone(), &options)
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains(&format!("wick predictor {command}")),
            "{error}"
        );
    }
}

#[test]
fn a_file_that_is_asked_for_must_be_there_and_usable() {
    let case = Case::of("opt-pre-ln");
    let open = |path: &std::path::Path| {
        FlashFolder::open_with(case.folder.path(), IoOptions::default(), Some(path))
    };
    let missing = case.place.path().join("none.safetensors");
    assert!(matches!(open(&missing), Err(Error::Open { .. })));
    for content in ["", "no header", "\u{1}\0\0\0\0\0\0\0{"] {
        std::fs::write(&missing, content).unwrap();
        let error = open(&missing).err().unwrap().to_string();
        assert!(error.contains("none.safetensors"), "{error}");
    }
    // Trouble with the folder's own is none for who uses others.
    let own = case.folder.path().join("predictors.safetensors");
    std::fs::write(&own, "no header").unwrap();
    let file = PredictorTensors::gate(&case.open(), "ffn_input", PackedBits::One);
    load(case.with(&file)).unwrap();
    assert!(load(Ok(case.open())).is_err());
}

/// Any byte of the file, or any length: an answer or an error, and the same answer wherever a checksum watches.
#[test]
fn random_damage_is_noticed() {
    let case = Case::of("opt-pre-ln");
    let folder = case.open();
    let kinds = [
        PredictorTensors::gate(&folder, "ffn_input", PackedBits::Two),
        PredictorTensors::low_rank(&folder, "layer_input", "relu", StoredDtype::I8),
    ];
    let mut refusals = 0;
    for file in kinds {
        let folder = case.with(&file).unwrap();
        let logits = |folder: FlashFolder| -> candle_wick_models::Result<Vec<f32>> {
            LoadedModel::load(folder, &LoadOptions::default())?.forward(&case.ids)
        };
        let good = with_slots(&folder, selector(&folder), 256)
            .forward(&case.ids)
            .unwrap();
        let bytes = std::fs::read(case.file()).unwrap();
        let data: usize = file.tensors.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(bytes.len() > data);
        for round in 0..150usize {
            let at = round * 7_919 * 31 % bytes.len();
            let mut bad = bytes.clone();
            match round % 8 {
                0 => bad.truncate(at),
                _ => bad[at] ^= 1 + (round % 255) as u8,
            }
            std::fs::write(case.file(), &bad).unwrap();
            let io = IoOptions::default();
            let path = case.file();
            let opened = FlashFolder::open_with(case.folder.path(), io, Some(&path));
            let got = opened
                .map_err(candle_wick_models::Error::from)
                .and_then(logits);
            match got {
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    refusals += 1;
                }
                // The header has no checksum of its own: a threshold may have changed.
                Ok(got) => assert!(got == good || at < 4096, "round {round}: byte {at}"),
            }
        }
    }
    assert!(refusals > 60, "{refusals} of 300 were noticed");
}
