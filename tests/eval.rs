//! `wick eval ppl`, and scoring continuations: against each text scored alone.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_wick::SelectorKind;
use candle_wick_models::{
    load, score, score_continuations, Continuation, Error, LoadedModel, WickTokenizer,
};
use serde_json::{json, Value};

use crate::demo::{assets, demo};
use crate::support::{converted, expected, field, fixture, json, options, refused, text, wick};

/// `wick` on a folder, with the words that come before it.
pub(crate) fn eval(before: &[&str], folder: &Path, words: &[&str]) -> Output {
    wick(&[before, &[text(folder)], words].concat())
}

/// As [`eval`], and the JSON object that it prints.
pub(crate) fn object(before: &[&str], folder: &Path, words: &[&str]) -> Value {
    json(&[before, &[text(folder)], words].concat())
}

/// As [`eval`], and the sentence with which it refuses.
pub(crate) fn refusal(before: &[&str], folder: &Path, words: &[&str]) -> String {
    refused(&[before, &[text(folder)], words].concat(), &[])
}

/// `ln p` of `ids[start..]` after what is before, by `score` over the whole text; and whether all are the likeliest.
fn alone(model: &mut LoadedModel, ids: &[u32], start: usize) -> (f64, bool) {
    let logprobs = score(model, ids).unwrap().logprobs;
    model.reset();
    let mut is_greedy = true;
    let mut check = |index: usize, logits: &[f32]| {
        if index + 1 >= start && index + 1 < ids.len() {
            let chosen = logits[ids[index + 1] as usize];
            is_greedy &= logits.iter().all(|logit| *logit <= chosen);
        }
        Ok(())
    };
    model.forward_each(ids, &mut check).unwrap();
    let mut sum = 0.0;
    logprobs[start - 1..]
        .iter()
        .for_each(|logprob| sum += logprob);
    (sum, is_greedy)
}

#[test]
fn continuations_share_a_context_and_score_as_if_alone_in_every_family() {
    for name in [
        "opt-pre-ln",
        "falcon-alibi-new-architecture",
        "llama-rope-dynamic",
        "mistral-sliding-window",
        "phi-2",
        "persimmon",
    ] {
        let folder = converted(&fixture(name));
        let (ids, greedy) = (expected(name).ids, expected(name).greedy);
        let mut model = load(folder.path(), &options(SelectorKind::Dense, None)).unwrap();
        // One more token than the shared context, one that greedy decoding writes, one with a context of its own.
        let texts = [
            ([&ids[..12], &ids[14..17]].concat(), 12),
            ([&ids[..], &greedy[..3]].concat(), ids.len()),
            ([&ids[..10], &[3, 5, 7], &ids[20..]].concat(), 11),
            (ids[..11].to_vec(), 10),
        ];
        let naive: Vec<(f64, bool)> = texts
            .iter()
            .map(|(ids, start)| alone(&mut model, ids, *start))
            .collect();
        assert!(naive[1].1 && !naive[0].1, "{name}: {naive:?}");
        let continuations = texts.map(|(ids, start)| Continuation::new(ids, start).unwrap());
        let scores = score_continuations(&mut model, &continuations).unwrap();
        for (score, (logprob, is_greedy)) in scores.iter().zip(&naive) {
            assert_eq!(score.logprob.to_bits(), logprob.to_bits(), "{name}");
            assert_eq!(score.is_greedy, *is_greedy, "{name}");
        }
        assert!(score_continuations(&mut model, &[]).unwrap().is_empty());
        let far = Continuation::new(vec![1, u32::MAX], 1).unwrap();
        let error = score_continuations(&mut model, &[far]).unwrap_err();
        assert!(
            matches!(error, Error::UnknownId { id: u32::MAX, .. }),
            "{error}"
        );
    }
}

/// The demo's model with a tokenizer that puts `</s>` before a text, as OPT's does.
pub(crate) fn with_bos() -> tempfile::TempDir {
    let source = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(assets().join(name), source.path().join(name)).unwrap();
    }
    let text = std::fs::read_to_string(assets().join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let special = json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [special, sequence("A")],
        "pair": [sequence("A"), sequence("B")],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    });
    std::fs::write(source.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let folder = converted(source.path());
    let predictors = "predictors.safetensors";
    std::fs::copy(assets().join(predictors), folder.path().join(predictors)).unwrap();
    folder
}

fn heldout() -> PathBuf {
    assets().join("heldout.txt")
}

#[test]
fn both_perplexities_are_those_of_score_and_the_budget_changes_none() {
    let (folder, file) = (demo(), heldout());
    let folder = folder.path();
    let file = file.to_str().unwrap();
    let text = [
        "--text-file",
        file,
        "--no-bos",
        "--ctx",
        "48",
        "--blocks",
        "4",
    ];
    let reports = ["45%", "60%", "90%"].map(|memory| {
        let words = [&text[..], &["--memory", memory]].concat();
        object(&["eval", "ppl"], folder, &words)
    });
    for report in &reports[1..] {
        for key in ["dense", "sparse"] {
            for name in ["block_nll", "nll", "perplexity"] {
                let [got, first] = [report, &reports[0]].map(|report| field(&report[key], name));
                assert_eq!(got, first);
            }
        }
        assert_eq!(field(report, "ratio"), field(&reports[0], "ratio"));
    }
    let blocks = [
        "--text-file",
        file,
        "--no-bos",
        "--block-tokens",
        "48",
        "--blocks",
        "4",
    ];
    for (key, selector) in [("dense", "dense"), ("sparse", "lowrank")] {
        let words = [&blocks[..], &["--selector", selector]].concat();
        let score = object(&["score"], folder, &words);
        let side = &reports[1][key];
        assert_eq!(side["selector"], selector);
        for name in ["block_nll", "perplexity"] {
            assert_eq!(field(side, name), field(&score, name));
        }
        assert_eq!(field(&side["nll"], "mean"), field(&score, "mean_nll"));
        let dropped = field(&score, "dropped_tokens");
        assert_eq!(field(&reports[1], "dropped_tokens"), dropped);
        assert_eq!(side["work"]["tokens"], 4 * 48);
    }
    let number = |value: &Value| value.as_f64().unwrap();
    let report = &reports[1];
    let ratio = number(&report["sparse"]["perplexity"]) / number(&report["dense"]["perplexity"]);
    assert!((number(&report["ratio"]) - ratio).abs() < 1e-9);
    let [dense, sparse] = ["dense", "sparse"].map(|key| &report[key]["work"]);
    assert_eq!(dense["selected_fraction"], 1.0);
    assert!(number(&sparse["selected_fraction"]) < 0.3, "{sparse}");
    assert!(number(&dense["bytes_read_per_token"]) > 0.0);
}

#[test]
fn a_special_token_comes_once_and_dense_alone_has_no_other_side() {
    let (folder, file) = (with_bos(), heldout());
    let words = [
        "--text-file",
        file.to_str().unwrap(),
        "--ctx",
        "16",
        "--blocks",
        "2",
    ];
    let dense = [&words[..], &["--selector", "dense"]].concat();
    let report = object(&["eval", "ppl"], folder.path(), &dense);
    for name in ["sparse", "ratio"] {
        assert!(field(&report, name).is_null(), "{name}");
    }
    let tokenizer = WickTokenizer::load(folder.path()).unwrap().unwrap();
    let ids = tokenizer
        .encode(&std::fs::read_to_string(&file).unwrap())
        .unwrap();
    assert_eq!(tokenizer.special_prefix().unwrap(), [1]);
    assert_eq!(ids[0], 1);
    let mut model = load(folder.path(), &options(SelectorKind::Dense, None)).unwrap();
    for (index, block) in ids.chunks_exact(16).take(2).enumerate() {
        let nll = score(&mut model, block).unwrap().mean_nll().unwrap();
        let got = report["dense"]["block_nll"][index].as_f64().unwrap();
        assert!((got - nll).abs() < 1e-12, "{got} {nll}");
    }
    let said = eval(&["eval", "ppl"], folder.path(), &words);
    let said = String::from_utf8(said.stdout).unwrap();
    for part in [
        "2 blocks of 16 tokens, 30 targets",
        "perplexity",
        "dense",
        "lowrank",
        "ratio",
        "±",
        "selected",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn perplexity_goes_on_from_its_results() {
    let (folder, file) = (with_bos(), heldout());
    let results = folder.path().join("results.jsonl");
    let results = results.to_str().unwrap();
    let text = [
        "--text-file",
        file.to_str().unwrap(),
        "--ctx",
        "24",
        "--results",
        results,
    ];
    let first = object(
        &["eval", "ppl"],
        folder.path(),
        &[&text[..], &["--blocks", "2"]].concat(),
    );
    let lines = std::fs::read_to_string(results).unwrap();
    assert_eq!(lines.lines().count(), 1 + 2 * 2);
    let more = object(
        &["eval", "ppl"],
        folder.path(),
        &[&text[..], &["--blocks", "3"]].concat(),
    );
    let longer = std::fs::read_to_string(results).unwrap();
    assert!(longer.starts_with(&lines) && longer.lines().count() == 1 + 3 * 2);
    for key in ["dense", "sparse"] {
        let [first, more] =
            [&first, &more].map(|report| report[key]["block_nll"].as_array().unwrap());
        assert_eq!(first[..], more[..2]);
    }
    let again = object(
        &["eval", "ppl"],
        folder.path(),
        &[&text[..], &["--blocks", "2"]].concat(),
    );
    assert_eq!(again, first);
    let other = [&text[..], &["--no-bos"]].concat();
    let stderr = refusal(&["eval", "ppl"], folder.path(), &other);
    assert!(
        stderr.contains("another special_tokens (true, now false)"),
        "{stderr}"
    );
}

/// One block of the text is scored, and kept in `results`.
fn kept_block<'a>(folder: &'a Path, file: &'a Path, results: &'a Path) -> [&'a str; 11] {
    let [folder, file, results] = [folder, file, results].map(text);
    [
        "eval",
        "ppl",
        folder,
        "--text-file",
        file,
        "--ctx",
        "24",
        "--blocks",
        "1",
        "--results",
        results,
    ]
}

/// Scores of other predictors, of which only a tensor's values differ, and those of other instructions are other scores.
#[test]
fn results_are_of_these_predictors_and_these_instructions() {
    let (folder, file) = (demo(), heldout());
    let place = tempfile::tempdir().unwrap();
    let [results, other] = ["results.jsonl", "other"].map(|name| place.path().join(name));
    let words = kept_block(folder.path(), &file, &results);
    let first = json(&words);
    let kept = std::fs::read(&results).unwrap();
    let mut bytes = std::fs::read(folder.path().join("predictors.safetensors")).unwrap();
    // The same file elsewhere is the same.
    std::fs::write(&other, &bytes).unwrap();
    let elsewhere = [&words[..], &["--predictors", text(&other)]].concat();
    assert_eq!(json(&elsewhere), first);
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header_bytes + 100] ^= 1;
    std::fs::write(&other, &bytes).unwrap();
    refused(&elsewhere, &["results.jsonl", "another predictors"]);
    let mut scalar = Command::new(env!("CARGO_BIN_EXE_wick"));
    let output = scalar
        .args(words)
        .env("WICK_ISA", "scalar")
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let is_scalar = String::from_utf8_lossy(&kept).contains("\"isa\":\"scalar\"");
    assert_eq!(said.contains("another isa"), !is_scalar, "{said}");
    assert_eq!(std::fs::read(&results).unwrap(), kept);
}

/// A kill in the middle of the first line leaves nothing to refuse.
#[test]
fn settings_that_were_cut_short_are_written_again() {
    let (folder, file) = (demo(), heldout());
    let place = tempfile::tempdir().unwrap();
    let results = place.path().join("results.jsonl");
    std::fs::write(&results, "{\"wick_results\":2,\"wick_ver").unwrap();
    let words = kept_block(folder.path(), &file, &results);
    let output = wick(&words);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    for part in ["results.jsonl", "dropped its last 27 bytes"] {
        assert!(said.contains(part), "{said}");
    }
    let lines = std::fs::read_to_string(&results).unwrap();
    assert_eq!(lines.lines().count(), 1 + 2);
    // Somebody's text is nobody's to drop.
    std::fs::write(&results, "Dear diary,").unwrap();
    refused(&words, &["results.jsonl", "no file of results"]);
    assert_eq!(std::fs::read_to_string(&results).unwrap(), "Dear diary,");
}

#[test]
fn texts_without_a_block_and_models_without_a_tokenizer_are_refused() {
    let folder = demo();
    let short = folder.path().join("short.txt");
    std::fs::write(&short, "It was").unwrap();
    let words = ["--text", short.to_str().unwrap(), "--ctx", "64"];
    let stderr = refusal(&["eval", "ppl"], folder.path(), &words);
    for part in ["short.txt", "not one block of 64"] {
        assert!(stderr.contains(part), "{stderr}");
    }
    let stderr = refusal(&["eval", "ppl"], folder.path(), &["--text", "/no/such"]);
    assert!(stderr.contains("/no/such"), "{stderr}");
    let words = ["--text", short.to_str().unwrap(), "--ctx", "1"];
    let stderr = refusal(&["eval", "ppl"], folder.path(), &words);
    assert!(stderr.contains("at least 2"), "{stderr}");
    let bare = converted(&fixture("opt-pre-ln"));
    let words = ["--text", short.to_str().unwrap()];
    let stderr = refusal(&["eval", "ppl"], bare.path(), &words);
    assert!(stderr.contains("no tokenizer.json"), "{stderr}");
}
