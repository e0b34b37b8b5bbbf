//! `wick eval tasks`: hand-made documents, against every text scored alone.

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_wick_models::WickTokenizer;
use flate2::write::GzEncoder;
use serde_json::{json, Value};

use crate::demo::demo;
use crate::eval::{eval, object, refusal, with_bos};
use crate::support::{converted, field, fixture};

const TASKS: [&str; 2] = ["eval", "tasks"];

/// Contexts, continuations and the label of a document.
type Text = (&'static [&'static str], &'static [&'static str], Value);

fn choices() -> Vec<Text> {
    vec![
        (
            &["It was a dark and stormy"],
            &[" night, and the wind howled", " cheese", " spoon of the"],
            json!(0),
        ),
        // The space at the end of the context is the continuation's.
        (&["He looked at "], &["her", "electricity"], json!(0)),
        (
            &["She said that"],
            &[" of of of", " she was glad"],
            json!(0),
        ),
        (
            &["The old man"],
            &[" sat", " sat down by the fire"],
            json!(1),
        ),
    ]
}

/// Winogrande's form: choices differ in the context.
fn partial() -> Vec<Text> {
    vec![
        (
            &[
                "The dog chased the cat because the dog",
                "The dog chased the cat because the cat",
            ],
            &[" was hungry.", " was hungry."],
            json!(0),
        ),
        (
            &["He gave it to", "Him gave it to"],
            &[" her.", " her."],
            json!(1),
        ),
    ]
}

fn words() -> Vec<Text> {
    vec![
        (&["He shook his"], &[" head"], json!(["head"])),
        (
            &["It was a dark and stormy"],
            &[" cheese"],
            json!(["cheese"]),
        ),
    ]
}

/// A line as OLMo's evaluations have it.
fn line(doc: usize, idx: usize, context: &str, continuation: &str, label: &Value) -> String {
    let line = json!({
        "request_type": "loglikelihood", "doc": {"query": "anything"}, "idx": idx, "task_name": "t",
        "doc_id": doc, "label": label,
        "request": {"context": context, "continuation": continuation},
    });
    format!("{line}\n")
}

/// The lines of all documents, each of them repeated without its context as some are.
fn lines(texts: &[Text]) -> String {
    let mut lines = String::new();
    for offset in [0, 1_000_000] {
        for (doc, (contexts, continuations, label)) in texts.iter().enumerate() {
            for (idx, continuation) in continuations.iter().enumerate() {
                let context = match offset {
                    0 => contexts[idx.min(contexts.len() - 1)],
                    _ => "Answer:",
                };
                lines.push_str(&line(doc + offset, idx, context, continuation, label));
            }
        }
    }
    lines
}

/// A folder with documents in the places and forms that are known.
fn data() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("piqa/rc_0shot");
    std::fs::create_dir_all(&place).unwrap();
    let file = std::fs::File::create(place.join("requests.jsonl.gz")).unwrap();
    let mut gzip = GzEncoder::new(file, flate2::Compression::default());
    gzip.write_all(lines(&choices()).as_bytes()).unwrap();
    gzip.finish().unwrap();
    let place = folder.path().join("lambada/bpb_0shot");
    std::fs::create_dir_all(&place).unwrap();
    std::fs::write(place.join("requests.jsonl"), lines(&words())).unwrap();
    std::fs::write(folder.path().join("winogrande.jsonl"), lines(&partial())).unwrap();
    folder
}

struct Naive<'a> {
    folder: &'a Path,
    tokenizer: WickTokenizer,
    before: Vec<u32>,
    selector: &'a str,
}

impl Naive<'_> {
    /// `ln p` of a continuation, from `wick score` over the whole text, and whether greedy decoding writes it.
    fn logprob(&self, context: &str, continuation: &str) -> (f64, bool) {
        let encode = |text: &str| self.tokenizer.encode_bare(text).unwrap();
        let ids = [
            &self.before[..],
            &encode(&format!("{context}{continuation}")),
        ]
        .concat();
        let start = self.before.len() + encode(context.trim_end()).len();
        let list = |ids: &[u32]| {
            let words: Vec<String> = ids.iter().map(u32::to_string).collect();
            words.join(",")
        };
        let words = ["--selector", self.selector, "--ids", &list(&ids)];
        let score = object(&["score"], self.folder, &words);
        let logprobs = score["logprobs"].as_array().unwrap();
        let sum = logprobs[start - 1..]
            .iter()
            .map(|logprob| logprob.as_f64().unwrap())
            .sum();
        let count = (ids.len() - start).to_string();
        let context = list(&ids[..start]);
        let words = [
            "--selector",
            self.selector,
            "--ids",
            &context,
            "-n",
            &count,
            "--temperature",
            "0",
        ];
        let written = object(&["run"], self.folder, &words);
        (sum, written["ids"] == json!(ids[start..]))
    }

    /// Of each choice of each document.
    fn all(&self, texts: &[Text]) -> Vec<Vec<(f64, bool)>> {
        let of_document = |(contexts, continuations, _): &Text| {
            let pairs = continuations.iter().enumerate();
            let pairs = pairs.map(|(idx, text)| (contexts[idx.min(contexts.len() - 1)], *text));
            pairs
                .map(|(context, text)| self.logprob(context, text))
                .collect()
        };
        texts.iter().map(of_document).collect()
    }
}

fn close(got: &Value, wanted: f64) {
    let got = got.as_f64().unwrap();
    assert!((got - wanted).abs() < 1e-9, "{got}, {wanted}");
}

fn share(right: impl Iterator<Item = bool>) -> f64 {
    let right: Vec<bool> = right.collect();
    right.iter().filter(|is| **is).count() as f64 / right.len() as f64
}

fn best(scores: impl Iterator<Item = f64>) -> u64 {
    let scores: Vec<f64> = scores.collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter().position(|score| *score == largest).unwrap() as u64
}

#[test]
fn scores_are_those_of_every_text_alone() {
    let (folder, data) = (with_bos(), data());
    let folder = folder.path();
    let words_given = [
        "--tasks",
        "piqa,winogrande,lambada",
        "--data",
        data.path().to_str().unwrap(),
    ];
    for (flags, has_bos) in [(&["--no-bos"][..], false), (&["--memory", "50%"][..], true)] {
        let report = object(&TASKS, folder, &[&words_given[..], flags].concat());
        assert_eq!(report["special_tokens"], has_bos);
        assert_eq!(report["is_interrupted"], false);
        for (key, selector) in [("dense", "dense"), ("sparse", "lowrank")] {
            let tokenizer = WickTokenizer::load(folder).unwrap().unwrap();
            let before = match has_bos {
                true => tokenizer.special_prefix().unwrap(),
                false => Vec::new(),
            };
            let naive = Naive {
                folder,
                tokenizer,
                before,
                selector,
            };
            let labels = |texts: &[Text]| -> Vec<Option<u64>> {
                texts.iter().map(|(_, _, label)| label.as_u64()).collect()
            };
            let right = |scores: &[Vec<(f64, bool)>], texts: &[Text], by_length: bool| {
                let pairs = scores.iter().zip(texts).zip(labels(texts));
                share(pairs.map(|((scores, (_, continuations, _)), label)| {
                    let lengths = continuations.iter().map(|text| match by_length {
                        true => text.trim_start().chars().count() as f64,
                        false => 1.0,
                    });
                    Some(best(
                        scores
                            .iter()
                            .zip(lengths)
                            .map(|(score, length)| score.0 / length),
                    )) == label
                }))
            };
            let [piqa, winogrande, lambada] =
                [0, 1, 2].map(|index: usize| &report["tasks"][index][key]);
            let scores = naive.all(&choices());
            assert_eq!(piqa["documents"], 4);
            close(&piqa["acc"]["mean"], right(&scores, &choices(), false));
            close(&piqa["acc_norm"]["mean"], right(&scores, &choices(), true));
            let scores = naive.all(&partial());
            close(
                &winogrande["acc"]["mean"],
                right(&scores, &partial(), false),
            );
            assert!(field(winogrande, "acc_norm").is_null());
            let scores = naive.all(&words());
            close(
                &lambada["acc"]["mean"],
                share(scores.iter().map(|choices| choices[0].1)),
            );
            let nll = -scores.iter().map(|choices| choices[0].0).sum::<f64>() / 2.0;
            close(&lambada["nll"]["mean"], nll);
            close(&lambada["perplexity"], nll.exp());
        }
        let difference = &report["tasks"][2]["difference"]["nll"]["mean"];
        let nll = |key: &str| report["tasks"][2][key]["nll"]["mean"].as_f64().unwrap();
        close(difference, nll("sparse") - nll("dense"));
    }
}

#[test]
fn a_second_start_goes_on_and_gives_the_same_scores() {
    let (folder, data) = (demo(), data());
    let results = data.path().join("results.jsonl");
    let given = [
        "--tasks",
        "piqa,lambada",
        "--data",
        data.path().to_str().unwrap(),
        "--no-bos",
    ];
    let whole = object(&TASKS, folder.path(), &given);
    let kept = [&given[..], &["--results", results.to_str().unwrap()]].concat();
    let first = object(
        &TASKS,
        folder.path(),
        &[&kept[..], &["--limit", "2"]].concat(),
    );
    assert_eq!(first["tasks"][0]["documents"], 2);
    let text = std::fs::read_to_string(&results).unwrap();
    assert_eq!(text.lines().count(), 1 + 2 * (2 + 2));
    // As if killed in the middle of a line.
    std::fs::write(&results, &text[..text.len() - 20]).unwrap();
    let resumed = object(&TASKS, folder.path(), &kept);
    let scores = |report: &Value| {
        let mut tasks = report["tasks"].clone();
        for task in tasks.as_array_mut().unwrap() {
            for side in ["dense", "sparse"] {
                // Reads depend on what was cached.
                task[side]["work"] = Value::Null;
            }
        }
        tasks
    };
    assert_eq!(scores(&resumed), scores(&whole));
    assert_eq!(
        std::fs::read_to_string(&results).unwrap().lines().count(),
        1 + 2 * (4 + 2)
    );
    // Nothing is left to compute, so the file stays as it is.
    let before = std::fs::read(&results).unwrap();
    assert_eq!(object(&TASKS, folder.path(), &kept), resumed);
    assert_eq!(std::fs::read(&results).unwrap(), before);

    let stderr = refusal(
        &TASKS,
        folder.path(),
        &[&kept[..], &["--ctx", "64"]].concat(),
    );
    assert!(stderr.contains("another ctx"), "{stderr}");
    let stderr = refusal(
        &TASKS,
        folder.path(),
        &[&kept[..], &["--memory", "50%"]].concat(),
    );
    assert!(stderr.contains("another memory"), "{stderr}");
    let gate = data.path().join("piqa/rc_0shot/requests.jsonl.gz");
    std::fs::write(gate, lines(&choices()).replace("stormy", "silent")).unwrap();
    let stderr = refusal(&TASKS, folder.path(), &kept);
    assert!(
        stderr.contains("document 0 of piqa has other tokens now"),
        "{stderr}"
    );
}

#[test]
fn long_contexts_lose_their_beginning_and_are_counted() {
    let (folder, data) = (demo(), data());
    let given = [
        "--tasks",
        "piqa",
        "--data",
        data.path().to_str().unwrap(),
        "--no-bos",
    ];
    let short = [&given[..], &["--ctx", "9", "--selector", "dense"]].concat();
    let report = object(&TASKS, folder.path(), &short);
    let tokenizer = WickTokenizer::load(folder.path()).unwrap().unwrap();
    let tokens = |text: &str| tokenizer.encode_bare(text).unwrap().len();
    let is_cut = |(contexts, continuations, _): &&Text| {
        let mut joint = continuations
            .iter()
            .map(|text| tokens(&format!("{}{text}", contexts[0])));
        joint.any(|tokens| tokens > 10)
    };
    let cut = choices().iter().filter(is_cut).count();
    assert!(cut > 0 && cut < 4, "{cut} documents of 4");
    assert_eq!(report["tasks"][0]["cut_documents"], cut);
    let said = eval(&TASKS, folder.path(), &short);
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(
        said.contains(&format!("{cut} documents lost the beginning")),
        "{said}"
    );
    let shorter = [&given[..], &["--ctx", "2"]].concat();
    let stderr = refusal(&TASKS, folder.path(), &shorter);
    for part in ["requests.jsonl.gz, line 1, document 0", "context of 2"] {
        assert!(stderr.contains(part), "{stderr}");
    }
}

#[test]
fn what_cannot_be_scored_is_refused_with_a_sentence() {
    let (folder, data) = (demo(), data());
    let place = |name: &str, text: &str| -> PathBuf {
        let path = data.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let good = lines(&choices());
    place(
        "arc_easy.jsonl",
        &good.replacen("\"idx\":1", "\"idx\":2", 1),
    );
    place(
        "arc_challenge.jsonl",
        &good.replace("\"label\":0", "\"label\":9"),
    );
    place("hellaswag.jsonl", &(good.clone() + "nonsense\n"));
    place("mmlu.jsonl", "\n");
    let data_dir = data.path().to_str().unwrap();
    for (tasks, parts) in [
        (
            "arc_easy",
            [
                "arc_easy.jsonl, line 2",
                "choice 2 of document 0 where 1 should be",
            ],
        ),
        (
            "arc_challenge",
            [
                "arc_challenge.jsonl, line 1",
                "document 0 of 3 choices has label 9",
            ],
        ),
        ("hellaswag", ["hellaswag.jsonl, line ", "expected"]),
        ("mmlu", ["mmlu.jsonl", "has no documents"]),
        ("piqa/mc_5shot", ["piqa/mc_5shot", "is not there"]),
        ("piqa,piqa", ["piqa", "twice"]),
        ("boolq", ["unknown task", "arc_easy"]),
        ("piqa/../../etc", ["folder's name", "--tasks"]),
    ] {
        let words = ["--tasks", tasks, "--data", data_dir];
        let stderr = refusal(&TASKS, folder.path(), &words);
        for part in parts {
            assert!(stderr.contains(part), "{tasks}: {stderr}");
        }
    }
    place("mmlu.jsonl", &good.replace("He looked at ", "  "));
    let words = ["--tasks", "mmlu", "--data", data_dir, "--no-bos"];
    let stderr = refusal(&TASKS, folder.path(), &words);
    for part in ["mmlu.jsonl, line 4, document 1", "nothing precedes"] {
        assert!(stderr.contains(part), "{stderr}");
    }
    let bare = converted(&fixture("opt-pre-ln"));
    let words = ["--tasks", "piqa", "--data", data_dir];
    let stderr = refusal(&TASKS, bare.path(), &words);
    assert!(stderr.contains("no tokenizer.json"), "{stderr}");
}

/// The last document of the last task is what is wrong, and nothing was computed or kept before that is said.
#[test]
fn every_document_is_checked_before_the_first_is_scored() {
    let (folder, data) = (demo(), data());
    let results = data.path().join("results.jsonl");
    let given = [
        "--tasks",
        "piqa,lambada",
        "--data",
        data.path().to_str().unwrap(),
        "--results",
        results.to_str().unwrap(),
        "--ctx",
        "24",
        "--no-bos",
    ];
    let place = data.path().join("lambada/bpb_0shot/requests.jsonl");
    let good = lines(&words());
    let far = "on and on ".repeat(30);
    for (context, continuation, reason) in [
        ("It was", far.as_str(), "context of 24"),
        ("  ", "dark", "nothing precedes"),
        ("It was dre", "am", "adds no token"),
    ] {
        let last = line(2, 0, context, continuation, &json!(["word"]));
        std::fs::write(&place, good.clone() + &last).unwrap();
        let stderr = refusal(&TASKS, folder.path(), &given);
        for part in ["requests.jsonl, line 5, document 2", reason] {
            assert!(stderr.contains(part), "{stderr}");
        }
        assert!(!results.exists(), "{reason}");
    }
    std::fs::write(&place, good).unwrap();
    object(&TASKS, folder.path(), &given);
    assert!(results.exists());
}

#[test]
fn the_table_has_both_sides_and_their_difference() {
    let (folder, data) = (demo(), data());
    let words = [
        "--tasks",
        "piqa,lambada",
        "--data",
        data.path().to_str().unwrap(),
    ];
    let said = eval(&TASKS, folder.path(), &words);
    let said = String::from_utf8(said.stdout).unwrap();
    for part in [
        "| piqa | 4 of 4 | dense |",
        "| piqa | 4 of 4 | lowrank |",
        "| piqa | | difference |",
        "| lambada | 2 of 2 | lowrank |",
        "| x ",
        "±",
        "lowrank: ",
        "% of the FFN selected",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}
