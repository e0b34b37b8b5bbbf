//! Prompts, flags and folders that a model cannot be run with.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::convert::Place;
use super::{complete_folder, converted, copy_folder, edit_json, fixture, refused, text, wick};

type Edit = fn(&mut Value);

fn ids(count: usize) -> String {
    vec!["5"; count].join(",")
}

#[test]
fn budgets_below_the_floor() {
    let folder = converted(&fixture("opt-pre-ln"));
    let model = text(folder.path());
    for command in ["run", "score", "plan"] {
        let with = |memory| {
            let mut words = vec![command, model, "--memory", memory];
            words.extend(["--ids", "1,2"].iter().filter(|_| command != "plan"));
            words
        };
        let parts = [
            "below the floor of",
            "1048576 bytes",
            "process",
            "KV cache",
            "pass of slots",
        ];
        refused(&with("1MiB"), &parts);
        refused(
            &with("1%"),
            &[
                "below the floor of",
                "bytes",
                "norms and biases",
                "pass of slots",
            ],
        );
        refused(&with("1"), &["a budget of 1 B (1 bytes)"]);
    }
    // One byte less than the floor that is named.
    let plan = wick(&["plan", model, "--memory", "100%", "--json"], b"");
    let plan: Value = serde_json::from_str(&plan.is_success("plan").stdout).unwrap();
    let floor = plan["floor_bytes"].as_u64().unwrap();
    let under = (floor - (1 << 20)).to_string();
    refused(
        &["run", model, "--ids", "1", "--memory", &under],
        &[&under, "below the floor of"],
    );
}

#[test]
fn shares_that_the_machine_cannot_hold() {
    let folder = converted(&fixture("llama-2-silu"));
    let config = folder.path().join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json["max_position_embeddings"] = 16_000_000.into();
    // Wider heads would not fit the tensors: the context alone has to be absurd.
    super::replace_listed(folder.path(), "config.json", json.to_string().as_bytes());
    let long = [
        "run",
        text(folder.path()),
        "--ids",
        "1",
        "--ctx",
        "16000000",
    ];
    let with = |memory: &'static str| [&long[..], &["--memory", memory]].concat();
    refused(&with("2GiB"), &["below the floor of", "KV cache 2"]);
    let available = candle_wick::available_memory_bytes();
    if available.is_some_and(|bytes| bytes < 24 << 30) {
        refused(&with("100%"), &["bytes more", "are free", "--ctx"]);
    } else {
        eprintln!("skipped: this machine may hold 23 GiB");
    }
}

#[test]
fn prompts_without_tokens() {
    let folder = complete_folder("opt-pre-ln", false);
    let model = text(folder.path());
    let empty = folder.path().join("empty.txt");
    fs::write(&empty, "\n").unwrap();
    for prompt in [
        &["-p", ""][..],
        &["--ids", ""],
        &[],
        &["--ids", " , "],
        &["--prompt-file", text(&empty)],
    ] {
        refused(&[&["run", model][..], prompt].concat(), &["0 tokens"]);
    }
    refused(&["score", model, "--text", ""], &["0 tokens"]);
    refused(&["score", model, "--ids", ""], &["0 tokens"]);
    refused(
        &["run", model, "--prompt-file", "/no/such/file"],
        &["/no/such/file"],
    );
    let said = wick(&["run", model], &[0xff, 0xfe, 0x00]);
    said.is_refusal("bytes that are no text", &["standard input", "UTF-8"]);
}

#[test]
fn prompts_around_the_context() {
    let folder = converted(&fixture("opt-pre-ln"));
    let model = text(folder.path());
    for (ctx, flags) in [(128, &[][..]), (16, &["--ctx", "16"])] {
        let run = |count: usize| {
            let ids = ids(count);
            let words = ["run", model, "--ids", &ids, "-n", "5", "--json"];
            wick(&[&words[..], flags].concat(), b"")
        };
        let full = run(ctx);
        let report: Value =
            serde_json::from_str(&full.is_success("as long as the context").stdout).unwrap();
        assert!(report["ids"].as_array().unwrap().len() <= 1, "{report}");
        for count in [ctx + 1, 10 * ctx] {
            let numbers = [format!("{count} tokens"), ctx.to_string()];
            run(count).is_refusal("longer", &[&numbers[0], &numbers[1], "--ctx"]);
        }
    }
    refused(
        &["score", model, "--ids", &ids(129)],
        &["129 tokens", "128"],
    );
}

#[test]
fn nothing_to_generate_is_fine() {
    let folder = converted(&fixture("opt-pre-ln"));
    for count in ["0", "1"] {
        let said = wick(
            &[
                "run",
                text(folder.path()),
                "--ids",
                "1,2",
                "-n",
                count,
                "--json",
            ],
            b"",
        );
        let report: Value = serde_json::from_str(&said.is_success(count).stdout).unwrap();
        assert_eq!(report["ids"].as_array().unwrap().len().to_string(), count);
    }
    // More than anybody can count: the context ends it.
    let endless = [
        "run",
        text(folder.path()),
        "--ids",
        "1,2",
        "-n",
        "18446744073709551615",
    ];
    wick(&endless, b"").is_success("endless");
}

#[test]
fn numbers_that_cannot_be() {
    let folder = converted(&fixture("opt-pre-ln"));
    let model = text(folder.path());
    let run = ["run", model, "--ids", "1,2"];
    for (flag, value, part) in [
        ("--ctx", "0", "context of 0"),
        ("--ctx", "129", "longest is 128"),
        ("--ctx", "18446744073709551615", "longest is 128"),
        ("--io-threads", "0", "got 0"),
        ("--io-threads", "1000000", "got 1000000"),
    ] {
        refused(&[&run[..], &[flag, value]].concat(), &[part]);
    }
    for outside in ["320", "4294967295"] {
        refused(
            &["run", model, "--ids", &format!("1,{outside}")],
            &[outside, "vocabulary of 320"],
        );
        refused(
            &["score", model, "--ids", &format!("{outside},1")],
            &[outside, "vocabulary of 320"],
        );
    }
    for wrong in [
        &["--ids", "1,x"][..],
        &["--ids", "-1"],
        &["--ids", "4294967296"],
        &["--selector", "psychic"],
        &["--memory", "0"],
        &["--memory", "101%"],
        &["--threads", "1000000"],
        &["--ctx", "-1"],
        &["-n", "many"],
    ] {
        let said = wick(&[&["run", model][..], wrong].concat(), b"");
        assert_eq!(said.status, Some(2), "{wrong:?}: {}", said.stderr);
        assert!(
            said.stderr.contains(wrong[1]) && !said.stderr.contains("panicked"),
            "{}",
            said.stderr
        );
    }
}

#[test]
fn selectors_that_a_model_does_not_have() {
    let relu = converted(&fixture("opt-pre-ln"));
    let silu = converted(&fixture("llama-2-silu"));
    for command in [
        &["run", "--ids", "1,2"][..],
        &["score", "--ids", "1,2"],
        &["plan"],
    ] {
        let with = |folder: &Path, selector: &'static str, parts: &[&str]| {
            let words = [
                &command[..1],
                &[text(folder)],
                &command[1..],
                &["--selector", selector],
            ];
            refused(&words.concat(), parts);
        };
        with(
            relu.path(),
            "lowrank",
            &["predictors.safetensors", text(relu.path())],
        );
        with(silu.path(), "lowrank", &["lowrank", "silu"]);
        with(silu.path(), "oracle", &["oracle", "silu"]);
    }
}

#[test]
fn predictors_of_another_model() {
    let own = complete_folder("opt-pre-ln", true);
    let other = complete_folder("llama-relu-gqa-f16", true);
    let path = own.path().join("predictors.safetensors");
    let hash = |folder: &Path| {
        let manifest = fs::read(folder.join("wick.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        manifest["model_hash"].as_str().unwrap().to_owned()
    };
    let run = [
        "run",
        text(own.path()),
        "--ids",
        "1,2",
        "-n",
        "2",
        "--selector",
        "lowrank",
    ];
    wick(&run, b"").is_success("own predictors");

    // As many layers, but made for other weights.
    let mut bytes = fs::read(&path).unwrap();
    let stolen = hash(other.path());
    let at = bytes
        .windows(16)
        .position(|window| window == hash(own.path()).as_bytes())
        .unwrap();
    bytes[at..at + 16].copy_from_slice(stolen.as_bytes());
    fs::write(&path, bytes).unwrap();
    refused(
        &run,
        &["predictors.safetensors", &stolen, &hash(own.path())],
    );

    fs::copy(other.path().join("predictors.safetensors"), &path).unwrap();
    refused(&run, &["predictors.safetensors"]);
    fs::write(&path, "not tensors").unwrap();
    refused(&run, &["predictors.safetensors"]);
    // Who does not need them is not stopped by them.
    let dense = [
        "run",
        text(own.path()),
        "--ids",
        "1,2",
        "-n",
        "2",
        "--selector",
        "dense",
    ];
    wick(&dense, b"").is_success("dense");
}

/// Case, damage, and what the refusal names.
const MANIFEST_DAMAGE: [(&str, Edit, &str); 13] = [
    ("version", |m| m["format_version"] = 2.into(), "version 2"),
    (
        "far version",
        |m| m["format_version"] = u64::MAX.into(),
        "18446744073709551615",
    ),
    (
        "no layers",
        |m| m["layers"] = Value::Array(Vec::new()),
        "model_hash",
    ),
    (
        "hidden",
        |m| m["layers"][0]["hidden_size"] = (1u64 << 60).into(),
        "hidden_size",
    ),
    (
        "intermediate",
        |m| m["layers"][1]["intermediate_size"] = 16_777_216.into(),
        "neurons",
    ),
    (
        "no neurons",
        |m| m["layers"][1]["intermediate_size"] = 0.into(),
        "intermediate_size",
    ),
    (
        "stride",
        |m| m["layers"][0]["stride_bytes"] = (1u64 << 62).into(),
        "stride_bytes",
    ),
    (
        "negative",
        |m| m["layers"][0]["stride_bytes"] = (-512).into(),
        "-512",
    ),
    (
        "sizes",
        |m| m["files"][0]["size_bytes"] = u64::MAX.into(),
        "size_bytes",
    ),
    (
        "another size",
        |m| m["files"][0]["size_bytes"] = (1u64 << 60).into(),
        "1152921504606846976",
    ),
    (
        "path",
        |m| m["files"][0]["name"] = "../../etc/passwd".into(),
        "../../etc/passwd",
    ),
    ("dtype", |m| m["dtype"] = "i4".into(), "i4"),
    (
        "layout",
        |m| m["layers"][0]["layout"] = "matrix".into(),
        "matrix",
    ),
];

#[test]
fn folders_that_are_no_conversions() {
    let folder = converted(&fixture("opt-pre-ln"));
    let run = ["run", text(folder.path()), "--ids", "1,2"];
    let manifest = folder.path().join("wick.json");
    let good = fs::read(&manifest).unwrap();
    for (case, edit, part) in MANIFEST_DAMAGE {
        edit_json(&manifest, edit);
        wick(&run, b"").is_refusal(case, &[part, text(folder.path())]);
        wick(&["inspect", run[1]], b"").is_refusal(case, &[part]);
        fs::write(&manifest, &good).unwrap();
    }
    for garbage in [
        "",
        "{",
        "[]",
        "null",
        "{\"format_version\":1}",
        "\u{0}\u{0}",
    ] {
        fs::write(&manifest, garbage).unwrap();
        refused(&run, &["wick.json"]);
    }
    fs::write(&manifest, vec![b'['; 1 << 20]).unwrap();
    refused(&run, &["wick.json"]);
    fs::remove_file(&manifest).unwrap();
    refused(&run, &[text(folder.path()), "no wick.json"]);
    refused(
        &["run", text(&folder.path().join("gone")), "--ids", "1"],
        &["no such folder"],
    );
    let source = fixture("opt-pre-ln");
    refused(&["plan", text(&source)], &["wick convert DIR OUT"]);
    let file = source.join("model.safetensors");
    refused(&["plan", text(&file)], &["a file", "wick convert FILE OUT"]);
    refused(
        &["run", text(&fixture("opt-pre-ln")), "--ids", "1"],
        &["opt-pre-ln", "no wick.json"],
    );
}

#[test]
fn dense_weight_bytes_beyond_belief() {
    let folder = converted(&fixture("opt-pre-ln"));
    edit_json(&folder.path().join("wick.json"), |m| {
        m["dense_weight_bytes"] = u64::MAX.into()
    });
    let run = [
        "run",
        text(folder.path()),
        "--ids",
        "1,2",
        "-n",
        "1",
        "--memory",
        "100%",
    ];
    wick(&run, b"").is_success("only what is there is loaded");
}

#[test]
fn tokenizers_that_are_broken_or_missing() {
    let folder = complete_folder("opt-pre-ln", false);
    let model = text(folder.path());
    let run = ["run", model, "-p", "Hello", "-n", "2"];
    wick(&run, b"").is_success("a good tokenizer");
    let good: Value =
        serde_json::from_slice(&fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap();
    let mut merges = good.clone();
    merges["model"]["merges"] = serde_json::json!(["no such"]);
    let mut kind = good;
    kind["model"]["type"] = "Oracle".into();
    for broken in [
        "",
        "{",
        "{}",
        "[1,2]",
        &merges.to_string(),
        &kind.to_string(),
    ] {
        super::replace_listed(folder.path(), "tokenizer.json", broken.as_bytes());
        refused(&run, &["tokenizer.json"]);
    }
    fs::write(folder.path().join("tokenizer.json"), "x").unwrap();
    refused(&run, &["tokenizer.json", "1 bytes"]);

    let plain = converted(&fixture("opt-pre-ln"));
    refused(
        &["run", text(plain.path()), "-p", "Hello"],
        &["no tokenizer.json", "--ids", text(plain.path())],
    );
    refused(
        &["score", text(plain.path()), "--text", "Hello"],
        &["no tokenizer.json"],
    );
}

#[test]
fn predictors_that_cannot_be_fitted() {
    let folder = complete_folder("opt-pre-ln", false);
    let silu = complete_folder("llama-2-silu", false);
    let words = folder.path().join("words.txt");
    fs::write(&words, "too short").unwrap();
    let copy = tempfile::tempdir().unwrap();
    copy_folder(folder.path(), copy.path());
    let fit = |folder: &Path, text_file: &Path, parts: &[&str]| {
        refused(
            &["predictor", "fit", text(folder), "--text", text(text_file)],
            parts,
        );
        assert!(!folder.join("predictors.safetensors").exists());
    };
    fit(folder.path(), Path::new("/no/such.txt"), &["/no/such.txt"]);
    fit(folder.path(), &words, &["token"]);
    fit(silu.path(), &words, &["silu"]);
    fs::remove_file(copy.path().join("tokenizer.json")).unwrap();
    fit(copy.path(), &words, &["tokenizer.json"]);
}

#[test]
fn weights_that_are_no_numbers() {
    let place = Place::of("llama-2-silu");
    place.rewrite(|name, view| {
        let mut data = view.data().to_vec();
        if name == "model.norm.weight" {
            data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        Some((view.dtype(), data))
    });
    let folder = converted(&place.source);
    let model = text(folder.path());
    refused(&["run", model, "--ids", "1,2"], &["not finite"]);
    refused(
        &["run", model, "--ids", "1,2", "--temperature", "0.8"],
        &["not finite"],
    );
    refused(&["score", model, "--ids", "1,2"], &["not finite"]);
}
