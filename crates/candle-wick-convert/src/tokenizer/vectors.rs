//! Real vocabularies against the ids that their original tokenizers give: see `scripts/tokenizer_vectors.py`, which
//! fetches them and runs this.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use tokenizers::Tokenizer;

use super::gguf::{from_gguf, GgufVocab};

/// Names the folder with `NAME.json` (a `GgufVocab`), `NAME.inp`, `NAME.out`, and `NAME/` (checkpoints of the same
/// vocabulary in other forms).
const FOLDER: &str = "WICK_TOKENIZER_VECTORS";
const BETWEEN_SAMPLES: &str = "\n__ggml_vocab_test__\n";

/// Samples with the ids that are expected, without those around the text.
fn samples(folder: &Path, name: &str) -> Option<Vec<(String, Vec<u32>)>> {
    let texts = fs::read_to_string(folder.join(format!("{name}.inp"))).ok()?;
    let ids = fs::read_to_string(folder.join(format!("{name}.out"))).unwrap();
    let ids = ids.lines().map(|line| {
        line.split_whitespace()
            .map(|id| id.parse().unwrap())
            .collect()
    });
    let texts = texts.split(BETWEEN_SAMPLES).map(str::to_string);
    Some(texts.zip(ids).collect())
}

/// Prints a row; returns whether every sample has the expected ids and comes back as text.
fn check(folder: &Path, name: &str, road: &str, json: &str) -> bool {
    let tokenizer = Tokenizer::from_str(json).unwrap();
    let Some(samples) = samples(folder, name) else {
        println!("| {name} | {road} | no vectors | loads |");
        return true;
    };
    assert!(samples.len() > 30, "{name} has {} samples", samples.len());
    let mut equal = 0;
    let mut back = 0;
    for (text, expected) in &samples {
        let ids = tokenizer
            .encode(text.as_str(), false)
            .unwrap()
            .get_ids()
            .to_vec();
        if ids == *expected {
            equal += 1;
        } else {
            println!("{name}: {text:?}: {ids:?}, expected {expected:?}");
        }
        let decoded = tokenizer.decode(&ids, false).unwrap();
        back += usize::from(decoded == *text);
    }
    println!(
        "| {name} | {road} | {equal} of {} | {back} come back as text |",
        samples.len()
    );
    equal == samples.len()
}

#[test]
#[ignore = "needs vocabularies: scripts/tokenizer_vectors.py"]
fn vocabularies_give_the_ids_of_their_original_tokenizers() {
    let folder = PathBuf::from(std::env::var(FOLDER).expect(FOLDER));
    let mut names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .filter_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            name.strip_suffix(".json").map(str::to_string)
        })
        .collect();
    names.sort();
    let (mut passed, mut failed) = (BTreeSet::new(), BTreeSet::new());
    for name in &names {
        let text = fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
        let vocab: GgufVocab = serde_json::from_str(&text).unwrap();
        let road = format!(
            "GGUF, {} {}",
            vocab.model,
            vocab.pre.as_deref().unwrap_or("")
        );
        let is_right = match from_gguf(&vocab) {
            Ok(json) => {
                assert_eq!(json, from_gguf(&vocab).unwrap(), "the same bytes");
                check(&folder, name, &road, &json)
            }
            Err(reason) => {
                println!("| {name} | {road} | none | {reason} |");
                continue;
            }
        };
        if is_right { &mut passed } else { &mut failed }.insert(name.clone());
        let checkpoint = folder.join(name);
        if checkpoint.is_dir() {
            let assembled = super::assemble(&checkpoint, "llama").unwrap();
            let json = assembled.json.expect("a tokenizer");
            if !check(&folder, name, "files of a checkpoint", &json) {
                failed.insert(format!("{name}/"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
    for needed in ["llama-spm", "falcon", "gpt-2"] {
        assert!(passed.contains(needed), "{needed} was not checked");
    }
}
