//! Tiny checkpoints with every kind of tokenizer file, whole and broken.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use serde_json::{json, Value};
use tempfile::TempDir;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::Tokenizer;

use super::*;
use crate::source::SMALL_FILE_BYTES_MAX;

/// The tokens before the bytes, as OPT has them.
const SPECIALS: [&str; 4] = ["<s>", "<pad>", "</s>", "<unk>"];
const MERGES: &str = "#version: 0.2\nh e\nl l\nhe ll\nhell o\nĠ hello\n";
const HELLO: u32 = 263;
const SPACE_HELLO: u32 = 264;

fn byte_tokens() -> Vec<String> {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort();
    alphabet.into_iter().map(String::from).collect()
}

/// `SPECIALS`, the bytes from 4, and what `MERGES` makes from 260.
fn vocab() -> BTreeMap<String, u32> {
    let merged = ["he", "ll", "hell", "hello", "Ġhello"].map(String::from);
    let tokens = SPECIALS
        .map(String::from)
        .into_iter()
        .chain(byte_tokens())
        .chain(merged);
    tokens.zip(0..).collect()
}

fn byte_level(files: &[(&str, Value)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("vocab.json"), json!(vocab()).to_string()).unwrap();
    fs::write(folder.path().join("merges.txt"), MERGES).unwrap();
    for (name, value) in files {
        fs::write(folder.path().join(name), value.to_string()).unwrap();
    }
    folder
}

/// As in facebook/opt-125m.
fn opt_settings() -> Value {
    let token = |content: &str| {
        json!({"__type": "AddedToken", "content": content, "lstrip": false, "normalized": true,
            "rstrip": false, "single_word": false})
    };
    json!({"errors": "replace", "unk_token": token("</s>"), "bos_token": token("</s>"),
        "eos_token": token("</s>"), "pad_token": token("<pad>"), "add_prefix_space": false,
        "add_bos_token": true, "tokenizer_class": "GPT2Tokenizer"})
}

fn assembled(folder: &Path, model_type: &str) -> Tokenizer {
    let assembled = assemble(folder, model_type).unwrap();
    let json = assembled
        .json
        .unwrap_or_else(|| panic!("{:?}", assembled.notes));
    let again = assemble(folder, model_type).unwrap();
    assert_eq!(Some(&json), again.json.as_ref(), "the same bytes");
    Tokenizer::from_str(&json).unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

fn note(folder: &Path, model_type: &str) -> String {
    let assembled = assemble(folder, model_type).unwrap();
    assert_eq!(assembled.json, None);
    assembled.notes.concat()
}

fn refusal(folder: &Path) -> String {
    let error = assemble(folder, "opt").err().expect("refused");
    error.to_string()
}

fn check_opt(tokenizer: &Tokenizer) {
    assert_eq!(ids(tokenizer, "hello hello"), [2, HELLO, SPACE_HELLO]);
    assert_eq!(ids(tokenizer, ""), [2]);
    assert_eq!(ids(tokenizer, "<pad>hello"), [2, 1, HELLO]);
    // As in transformers: what the text itself has counts besides.
    assert_eq!(ids(tokenizer, "</s>hello"), [2, 2, HELLO]);
    assert_eq!(
        tokenizer.decode(&[2, HELLO, SPACE_HELLO, 1], true).unwrap(),
        "hello hello"
    );
}

#[test]
fn opt_texts_begin_with_one_bos() {
    let folder = byte_level(&[("tokenizer_config.json", opt_settings())]);
    check_opt(&assembled(folder.path(), "opt"));
    let map = json!({"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"});
    let config = json!({"add_bos_token": true, "bos_token": "<s>"});
    let folder = byte_level(&[
        ("special_tokens_map.json", map),
        ("tokenizer_config.json", config),
    ]);
    check_opt(&assembled(folder.path(), "opt"));
    check_opt(&assembled(byte_level(&[]).path(), "opt"));
}

#[test]
fn gpt_2_and_phi_texts_begin_with_nothing() {
    // Phi: runs of spaces behind the vocabulary, with a hole between.
    let added = json!({"<|endoftext|>": 265, "  ": 270, "    ": 280});
    let class = json!({"tokenizer_class": "CodeGenTokenizer", "add_prefix_space": false});
    let folder = byte_level(&[
        ("added_tokens.json", added),
        ("tokenizer_config.json", class),
    ]);
    let tokenizer = assembled(folder.path(), "phi");
    assert_eq!(
        ids(&tokenizer, "hello    hello<|endoftext|>"),
        [HELLO, 280, HELLO, 265]
    );
    assert_eq!(
        tokenizer.decode(&[HELLO, 270, HELLO, 265], true).unwrap(),
        "hello  hello"
    );
    let tokenizer = assembled(byte_level(&[]).path(), "gpt2");
    assert_eq!(ids(&tokenizer, "hello"), [HELLO]);
    let prefix = json!({"add_prefix_space": true});
    let folder = byte_level(&[("tokenizer_config.json", prefix)]);
    assert_eq!(
        ids(&assembled(folder.path(), "gpt2"), "hello"),
        [SPACE_HELLO]
    );
}

#[test]
fn added_tokens_have_the_flags_of_the_settings() {
    let decoder = json!({"265": {"content": "<mark>", "lstrip": true, "special": false}, "2": {"content": "</s>", "special": true}});
    let class = json!({"added_tokens_decoder": decoder, "bos_token": "</s>", "add_bos_token": true,
        "additional_special_tokens": ["<mark>"], "add_eos_token": true, "eos_token": null});
    // The map counts for nothing beside a list of added tokens.
    let map = json!({"bos_token": "<s>"});
    let folder = byte_level(&[
        ("tokenizer_config.json", class),
        ("special_tokens_map.json", map),
    ]);
    let tokenizer = assembled(folder.path(), "opt");
    assert_eq!(ids(&tokenizer, "hello  <mark>"), [2, HELLO, 265]);
    assert_eq!(tokenizer.decode(&[HELLO, 265], true).unwrap(), "hello");
}

#[test]
fn falcon_cuts_as_its_vocabulary_says() {
    let mut vocab = vocab();
    vocab.insert("12".into(), 265);
    vocab.insert("123".into(), 266);
    let write = |vocab: &BTreeMap<String, u32>| {
        let folder = byte_level(&[("vocab.json", json!(vocab))]);
        fs::write(folder.path().join("merges.txt"), "1 2\n12 3\n").unwrap();
        assembled(folder.path(), "falcon")
    };
    let zero = vocab["0"];
    assert_eq!(ids(&write(&vocab), "0123"), [zero, 266]);
    vocab.insert(">>TITLE<<".into(), 267);
    let (three, twelve) = (vocab["3"], 265);
    assert_eq!(ids(&write(&vocab), "0123"), [zero, twelve, three]);
    assert_eq!(ids(&write(&vocab), "123012"), [266, zero, twelve]);
}

#[test]
fn the_first_of_several_counts() {
    let folder = byte_level(&[("tokenizer_config.json", opt_settings())]);
    fs::write(folder.path().join("tokenizer.model"), "broken").unwrap();
    check_opt(&assembled(folder.path(), "opt"));
    fs::write(folder.path().join("tokenizer.json"), "copied as it is").unwrap();
    fs::write(folder.path().join("vocab.json"), "broken").unwrap();
    let assembled = assemble(folder.path(), "opt").unwrap();
    assert!(assembled.json.is_none() && assembled.notes.is_empty());
}

#[test]
fn what_is_missing_or_unknown_is_a_note() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "--ids",
    ] {
        assert!(note(folder.path(), "opt").contains(name));
    }
    fs::write(folder.path().join("vocab.json"), "{}").unwrap();
    assert!(note(folder.path(), "opt").contains("vocab.json with merges.txt"));
    let class = json!({"tokenizer_class": "CLIPTokenizer"});
    let folder = byte_level(&[("tokenizer_config.json", class.clone())]);
    assert!(note(folder.path(), "opt").contains("CLIPTokenizer"));
    assert!(note(byte_level(&[]).path(), "llama").contains("llama"));
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.model"), "").unwrap();
    fs::write(
        folder.path().join("tokenizer_config.json"),
        class.to_string(),
    )
    .unwrap();
    assert!(note(folder.path(), "llama").contains("CLIPTokenizer"));
}

#[test]
fn broken_files_are_refused_by_name() {
    let lfs: &[u8] = b"version https://git-lfs.github.com/spec/v1\n";
    let broken: [(&str, &[u8], &str); 17] = [
        ("vocab.json", b"{", "tokens"),
        ("vocab.json", b"[]", "tokens"),
        ("vocab.json", b"{}", "no tokens"),
        ("vocab.json", br#"{"a": -1}"#, "tokens"),
        ("vocab.json", br#"{"a": 1, "b": 1}"#, "both `a` and `b`"),
        (
            "vocab.json",
            br#"{"a": 1, "</s>": 2}"#,
            "no token `h`, which merge 1",
        ),
        ("vocab.json", lfs, "git lfs pull"),
        ("merges.txt", b"a b c\n", "line 1"),
        ("merges.txt", b"#version: 0.2\na\n", "line 2"),
        ("merges.txt", b"a \xff\n", "byte 2"),
        ("tokenizer_config.json", b"[]", "JSON object"),
        (
            "tokenizer_config.json",
            br#"{"add_bos_token": "yes"}"#,
            "true or false",
        ),
        ("tokenizer_config.json", br#"{"bos_token": 7}"#, "bos_token"),
        (
            "tokenizer_config.json",
            br#"{"added_tokens_decoder": {"x": "y"}}"#,
            "by id",
        ),
        (
            "special_tokens_map.json",
            br#"{"additional_special_tokens": {}}"#,
            "list",
        ),
        ("added_tokens.json", br#"{"a": "b"}"#, "id of a token"),
        ("added_tokens.json", br#"{"": 7}"#, "id of a token"),
    ];
    for (name, bytes, part) in broken {
        let folder = byte_level(&[]);
        fs::write(folder.path().join(name), bytes).unwrap();
        let sentence = refusal(folder.path());
        assert!(
            sentence.contains(name) && sentence.contains(part),
            "{name}: {sentence}"
        );
    }
    let large = byte_level(&[]);
    let file = fs::File::create(large.path().join("merges.txt")).unwrap();
    file.set_len(SMALL_FILE_BYTES_MAX + 1).unwrap();
    assert!(refusal(large.path()).contains("merges.txt is larger"));
}

#[test]
fn files_that_contradict_each_other_are_refused() {
    let twice = byte_level(&[("added_tokens.json", json!({"h": 300}))]);
    assert!(
        refusal(twice.path()).contains("`h` two ids"),
        "{}",
        refusal(twice.path())
    );
    let bos = byte_level(&[("tokenizer_config.json", json!({"bos_token": "<bos>"}))]);
    assert!(refusal(bos.path()).contains("`<bos>`"));
    let eos = byte_level(&[("tokenizer_config.json", json!({"add_eos_token": true}))]);
    let mut without = vocab();
    without.remove("</s>");
    fs::write(eos.path().join("vocab.json"), json!(without).to_string()).unwrap();
    assert!(
        refusal(eos.path()).contains("`eos_token`"),
        "{}",
        refusal(eos.path())
    );
    let none = byte_level(&[(
        "tokenizer_config.json",
        json!({"add_bos_token": true, "bos_token": null}),
    )]);
    assert_eq!(ids(&assembled(none.path(), "opt"), "hello"), [HELLO]);
}
