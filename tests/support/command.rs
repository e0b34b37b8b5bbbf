//! The built `wick`, called as people call it.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// What `wick` says to these words.
pub fn wick(words: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_wick");
    Command::new(program).args(words).output().unwrap()
}

/// The object that it prints with `--json`.
pub fn json(words: &[&str]) -> Value {
    let output = wick(&[words, &["--json"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What it says when it refuses, with all `parts` and nothing on stdout: one sentence behind its notes, if it has some; what is
/// wrong with flags may take lines.
pub fn refused(words: &[&str], parts: &[&str]) -> String {
    let output = wick(words);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{words:?}");
    assert!(output.stdout.is_empty(), "{words:?}");
    for part in parts {
        assert!(said.contains(part), "{words:?}: no {part:?} in {said}");
    }
    let sentences = said.lines().filter(|line| line.starts_with("wick: "));
    let is_last = said.lines().next_back().unwrap().starts_with("wick: ");
    let is_one = sentences.count() == 1 && is_last;
    assert!(is_one || said.starts_with("error: "), "{said}");
    said
}

/// A value that has to be there: one that is missing would equal another that is missing, and look like null.
pub fn field<'a>(object: &'a Value, name: &str) -> &'a Value {
    let value = object.get(name);
    value.unwrap_or_else(|| panic!("no {name} in {object}"))
}

/// A path as a word.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
