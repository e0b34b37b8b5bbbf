//! `wick score --block-tokens`: blocks of a long text, each as if it were scored alone.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_wick_models::WickTokenizer;
use serde_json::Value;

use crate::demo::demo;

const BLOCK: usize = 48;
const BLOCKS: usize = 3;

fn heldout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/opt-9m/heldout.txt")
}

fn score(folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    let dense = ["--selector", "dense"];
    command.arg("score").arg(folder).args(dense).args(words);
    command.output().unwrap()
}

fn json(folder: &Path, words: &[&str]) -> Value {
    let output = score(folder, &[words, &["--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn close(got: &Value, wanted: f64) {
    let got = got.as_f64().unwrap();
    assert!((got - wanted).abs() < 1e-9, "{got}, {wanted}");
}

#[test]
fn blocks_are_scored_as_texts_of_their_own() {
    let folder = demo();
    let folder = folder.path();
    let tokenizer = WickTokenizer::load(folder).unwrap().unwrap();
    let file = heldout();
    let text = std::fs::read_to_string(&file).unwrap();
    let ids = tokenizer.encode_bare(&text).unwrap();
    let (block_tokens, blocks) = (BLOCK.to_string(), BLOCKS.to_string());
    let source = ["--text-file", file.to_str().unwrap(), "--no-bos"];
    let cut = ["--block-tokens", &block_tokens, "--blocks", &blocks];
    let score = json(folder, &[&source[..], &cut].concat());

    let mut sum = 0.0;
    for (index, block) in ids.chunks_exact(BLOCK).take(BLOCKS).enumerate() {
        let words: Vec<String> = block.iter().map(u32::to_string).collect();
        let alone = json(folder, &["--ids", &words.join(",")]);
        let logprobs = alone["logprobs"].as_array().unwrap();
        assert_eq!(logprobs.len(), BLOCK - 1);
        let nll: f64 = logprobs
            .iter()
            .map(|logprob| -logprob.as_f64().unwrap())
            .sum();
        close(&score["block_nll"][index], nll / (BLOCK - 1) as f64);
        sum += nll;
    }
    let mean = sum / (BLOCKS * (BLOCK - 1)) as f64;
    close(&score["mean_nll"], mean);
    close(&score["perplexity"], mean.exp());
    assert_eq!(score["blocks"], BLOCKS);
    assert_eq!(score["targets"], BLOCKS * (BLOCK - 1));
    assert_eq!(score["dropped_tokens"], ids.len() - BLOCKS * BLOCK);
}

#[test]
fn a_text_in_blocks_may_be_longer_than_the_context_and_its_tail_is_dropped() {
    let folder = demo();
    let ids: Vec<String> = (0..70).map(|id| (100 + id * 3).to_string()).collect();
    let ids = ids.join(",");
    let source = ["--ids", &ids, "--ctx", "32", "--block-tokens"];
    let said = score(folder.path(), &[&source[..], &["32"]].concat());
    let said = String::from_utf8(said.stdout).unwrap();
    for part in [
        "70 (2 blocks of 32, 6 dropped)",
        "targets     62",
        "perplexity",
    ] {
        assert!(said.contains(part), "{said}");
    }
    for (block_tokens, parts) in [
        ("33", ["33 tokens", "context 32"]),
        ("71", ["70 tokens", "block of 71"]),
        ("1", ["at least 2", "--block-tokens"]),
    ] {
        let output = score(folder.path(), &[&source[..], &[block_tokens]].concat());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{block_tokens}");
        assert!(parts.iter().all(|part| stderr.contains(part)), "{stderr}");
    }
}
