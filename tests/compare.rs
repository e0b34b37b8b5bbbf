//! `wick compare`: both texts as `wick run` writes them, and what both thought where they part.

use std::path::Path;

use serde_json::Value;

use crate::demo::{assets, demo};
use crate::eval::{eval, object, refusal};
use crate::support::{converted, field, fixture};

fn ids(value: &Value) -> Vec<u64> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap()).collect()
}

/// Of the last of these ids, after those before it.
fn last_logprob(folder: &Path, ids: &str, selector: &str) -> f64 {
    let words = ["--ids", ids, "--selector", selector];
    let score = object(&["score"], folder, &words);
    let logprobs = score["logprobs"].as_array().unwrap();
    logprobs.last().unwrap().as_f64().unwrap()
}

#[test]
fn texts_are_those_of_run_and_probabilities_those_of_score() {
    let folder = demo();
    let folder = folder.path();
    // Predictors that miss half of what is active, so that the texts part.
    let text = assets().join("calibration.txt");
    let text = text.to_str().unwrap();
    let options = "--rank 4 --recall 0.5 --tokens 1500".split(' ');
    let poor: Vec<&str> = ["--text-file", text].into_iter().chain(options).collect();
    object(&["predictor", "fit"], folder, &poor);
    let prompt = "It was a dark and";
    let words = ["-p", prompt, "-n", "48", "--memory", "60%"];
    let report = object(&["compare"], folder, &words);
    let mut written = Vec::new();
    for (key, selector) in [("dense", "dense"), ("sparse", "lowrank")] {
        let words = [&words[..], &["--temperature", "0", "--selector", selector]].concat();
        let run = object(&["run"], folder, &words);
        assert_eq!(report[key]["selector"], selector);
        for figure in ["ids", "text", "stop"] {
            assert_eq!(report[key][figure], run[figure], "{selector}");
        }
        written.push(ids(&run["ids"]));
    }
    let pairs = written[0].iter().zip(&written[1]);
    let equal = pairs.take_while(|(a, b)| a == b).count();
    assert_eq!(report["equal_tokens"], equal);
    assert!(equal < 48, "the texts are the same: nothing is tested");

    let tokenizer = candle_wick_models::WickTokenizer::load(folder)
        .unwrap()
        .unwrap();
    let before = tokenizer.encode(prompt).unwrap();
    assert_eq!(report["prompt_tokens"], before.len());
    let shared = before
        .iter()
        .map(|id| u64::from(*id))
        .chain(written[0][..equal].to_vec());
    let shared: Vec<u64> = shared.collect();
    for (key, text) in [("dense", &written[0]), ("sparse", &written[1])] {
        let token = &report["difference"][key];
        assert_eq!(token["id"], text[equal]);
        let list: Vec<String> = shared
            .iter()
            .chain([&text[equal]])
            .map(u64::to_string)
            .collect();
        for (figure, selector) in [
            ("probability_dense", "dense"),
            ("probability_sparse", "lowrank"),
        ] {
            let logprob = last_logprob(folder, &list.join(","), selector);
            let got = token[figure].as_f64().unwrap();
            assert!(
                (got - logprob.exp()).abs() < 1e-12,
                "{got} {}",
                logprob.exp()
            );
        }
    }
    let said = eval(&["compare"], folder, &words);
    let said = String::from_utf8(said.stdout).unwrap();
    assert_eq!(said.matches("[[").count(), 2, "{said}");
    assert!(said.contains(&format!("{equal} equal tokens")), "{said}");
    assert!(said.contains("|  lowrank") && said.contains(" %"), "{said}");
}

#[test]
fn a_selector_that_changes_nothing_gives_the_same_text() {
    let folder = demo();
    let words = ["-p", "It was a", "-n", "12", "--selector", "oracle"];
    let report = object(&["compare"], folder.path(), &words);
    assert!(field(&report, "difference").is_null());
    assert_eq!(report["equal_tokens"], ids(&report["dense"]["ids"]).len());
    let [dense, sparse] = ["dense", "sparse"].map(|side| field(&report[side], "text"));
    assert_eq!(dense, sparse);
    let said = eval(&["compare"], folder.path(), &words);
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(
        said.contains("the same 12 tokens") && !said.contains("[["),
        "{said}"
    );
}

#[test]
fn a_model_without_a_tokenizer_takes_ids_and_dense_has_nothing_beside_it() {
    let folder = converted(&fixture("opt-pre-ln"));
    let words = ["--ids", "1,2,3", "-n", "4"];
    let stderr = refusal(&["compare"], folder.path(), &words);
    assert!(stderr.contains("nothing to compare"), "{stderr}");
    let oracle = [&words[..], &["--selector", "oracle"]].concat();
    let report = object(&["compare"], folder.path(), &oracle);
    assert!(field(&report["dense"], "text").is_null());
    let stderr = refusal(
        &["compare"],
        folder.path(),
        &["-p", "It", "--selector", "oracle"],
    );
    assert!(stderr.contains("no tokenizer.json"), "{stderr}");
    let stderr = refusal(&["compare"], folder.path(), &["--ids", "1,2", "-n", "0"]);
    assert!(stderr.contains("at least 1"), "{stderr}");
}
