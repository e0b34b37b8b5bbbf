//! Checkpoints without `tokenizer.json`: what the converted folder makes of a text.

use std::fs;
use std::path::Path;

use candle_wick::SelectorKind;
use candle_wick_convert::{convert, ConvertError, ConvertOptions, ConvertReport};
use candle_wick_models::{load, Sampling, Stop, TextGenerator, WickTokenizer};

use crate::support::{fixture, options};

/// `</s>`, with which OPT's texts begin and end.
const BOS: u32 = 2;

/// The OPT fixture with a vocabulary of letters and two merges, as facebook/opt-125m has them.
fn source() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture("opt-pre-ln")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let specials = ["<s>", "<pad>", "</s>", "<unk>", "Ġ"].map(String::from);
    let letters = ('a'..='z').map(String::from);
    let merged = ["he", "Ġhe"].map(String::from);
    let tokens = specials.into_iter().chain(letters).chain(merged);
    let vocab: serde_json::Map<_, _> = tokens.zip((0..).map(|id: u32| id.into())).collect();
    let settings = serde_json::json!({"tokenizer_class": "GPT2Tokenizer", "add_bos_token": true,
        "add_prefix_space": false, "bos_token": {"content": "</s>", "normalized": true},
        "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"});
    let files = [
        ("vocab.json", serde_json::Value::from(vocab).to_string()),
        ("merges.txt", "#version: 0.2\nh e\nĠ he\n".into()),
        ("tokenizer_config.json", settings.to_string()),
    ];
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn run(source: &Path, out: &Path) -> Result<ConvertReport, ConvertError> {
    convert(source, out, &ConvertOptions::default(), &|_| {})
}

#[test]
fn opt_texts_begin_with_one_bos_and_go_on_after_it() {
    let (source, out) = (source(), tempfile::tempdir().unwrap());
    let report = run(source.path(), out.path()).unwrap();
    assert_eq!(report.notes, Vec::<String>::new());
    assert!(report
        .files
        .iter()
        .any(|file| file.name == "tokenizer.json"));

    let tokenizer = WickTokenizer::load(out.path()).unwrap().unwrap();
    assert_eq!(tokenizer.token_id("</s>"), Some(BOS));
    let ids = tokenizer.encode("he he").unwrap();
    assert_eq!(ids, [BOS, 31, 32]);
    assert_eq!(tokenizer.decode(&ids).unwrap(), "he he");
    assert_eq!(tokenizer.encode("").unwrap(), [BOS]);

    // The BOS is the EOS, and a prompt that has it still goes on.
    let mut model = load(out.path(), &options(SelectorKind::Dense, None)).unwrap();
    assert_eq!(model.eos_token_ids(), [BOS]);
    let mut generator = TextGenerator::new(&mut model, &Sampling::default(), 3);
    generator.prompt(&ids).unwrap();
    let mut count = 0;
    while generator.next_token().unwrap().is_some() {
        count += 1;
    }
    assert_eq!((count, generator.stop()), (3, Some(Stop::Length)));
}

#[test]
fn a_second_conversion_gives_the_same_bytes() {
    let source = source();
    let text = |out: &Path| {
        run(source.path(), out).unwrap();
        fs::read(out.join("tokenizer.json")).unwrap()
    };
    let (out, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    assert_eq!(text(out.path()), text(other.path()));
    let again = run(source.path(), out.path()).unwrap();
    assert!(
        again.notes[0].contains("complete already"),
        "{:?}",
        again.notes
    );
    // What the tokenizer is made of is part of the job.
    fs::write(source.path().join("merges.txt"), "h e\n").unwrap();
    let error = run(source.path(), out.path()).unwrap_err();
    assert!(error.to_string().contains("another checkpoint"), "{error}");
}

#[test]
fn broken_vocabularies_stop_before_anything_is_written() {
    let (source, out) = (source(), tempfile::tempdir().unwrap());
    fs::write(source.path().join("vocab.json"), "{").unwrap();
    let error = run(source.path(), out.path()).unwrap_err();
    assert!(error.to_string().contains("vocab.json"), "{error}");
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
}

#[test]
fn a_checkpoint_without_a_tokenizer_converts_with_a_note() {
    let out = tempfile::tempdir().unwrap();
    let report = run(&fixture("opt-pre-ln"), out.path()).unwrap();
    let note = report.notes.concat();
    assert!(
        note.contains("no tokenizer.json") && note.contains("--ids"),
        "{note}"
    );
    assert!(WickTokenizer::load(out.path()).unwrap().is_none());
}
