//! Whatever is wrong with a file, a flag or the machine: status 1, one clear sentence with the file, the tensor or
//! the number, and nothing half-written.
//!
//! Every command here runs with backtraces switched on and 4 GiB of address space, so that neither a trace nor an
//! absurd allocation goes unnoticed.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use wick_format::FileHasher;

use crate::support::{converted, fixture, text};

mod config;
mod convert;
mod damage;
mod disk;
mod killed;
mod run;

/// How a command ended and what it said.
struct Said {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

/// `wick`, after `setting` was done in a shell.
fn command(setting: &str) -> Command {
    let mut command = Command::new("sh");
    let script = format!("{setting} ulimit -v 4194304 2>/dev/null; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_wick")]);
    command.env("RUST_BACKTRACE", "1");
    command
}

fn finish(mut command: Command, input: &[u8]) -> Said {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that needs no input may have closed the pipe already.
    let _unread = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    Said {
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn wick(arguments: &[&str], input: &[u8]) -> Said {
    let mut command = command("");
    command.args(arguments);
    finish(command, input)
}

impl Said {
    /// One sentence, status 1, and every one of `parts` in it.
    fn is_refusal(&self, case: &str, parts: &[&str]) {
        let Self { status, stderr, .. } = self;
        assert_eq!(*status, Some(1), "{case}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{case}: {stderr}");
        assert!(
            stderr.starts_with("wick: ") && stderr.len() < 1000,
            "{case}: {stderr}"
        );
        for word in ["panicked", "RUST_BACKTRACE", "stack backtrace"] {
            assert!(!stderr.contains(word), "{case}: {stderr}");
        }
        for part in parts {
            assert!(stderr.contains(part), "{case}: no {part:?} in {stderr}");
        }
    }

    fn is_success(&self, case: &str) -> &Self {
        assert_eq!(self.status, Some(0), "{case}: {}", self.stderr);
        self
    }
}

/// Runs a command that must be refused.
fn refused(arguments: &[&str], parts: &[&str]) {
    wick(arguments, b"").is_refusal(&arguments.join(" "), parts);
}

/// Names and contents of a folder's files.
fn snapshot(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let content = |path: PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read(path).unwrap())
    };
    files.filter(|path| path.is_file()).map(content).collect()
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for (name, bytes) in snapshot(from) {
        fs::write(to.join(name), bytes).unwrap();
    }
}

/// Changes a JSON file.
fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Writes a file of a converted folder, and its size and hash into the manifest.
pub(crate) fn replace_listed(folder: &Path, name: &str, bytes: &[u8]) {
    fs::write(folder.join(name), bytes).unwrap();
    let mut hasher = FileHasher::new();
    hasher.update(bytes);
    edit_json(&folder.join("wick.json"), |manifest| {
        for file in manifest["files"].as_array_mut().unwrap() {
            if file["name"] == name {
                file["size_bytes"] = bytes.len().into();
                file["xxh3"] = hasher.hex().into();
            }
        }
    });
}

/// A byte-level tokenizer without special tokens: token ids are the bytes.
fn byte_tokenizer() -> String {
    let mut vocabulary = serde_json::Map::new();
    let mut beyond = 256;
    for byte in 0..=255u32 {
        let visible = matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let spelling = if visible { byte } else { beyond };
        beyond += u32::from(!visible);
        let spelling = char::from_u32(spelling).unwrap();
        vocabulary.insert(spelling.to_string(), byte.into());
    }
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": [],
        },
    })
    .to_string()
}

/// A converted fixture with a tokenizer and, where neurons can be skipped, predictors.
fn complete_folder(name: &str, with_predictors: bool) -> tempfile::TempDir {
    let source = tempfile::tempdir().unwrap();
    copy_folder(&fixture(name), source.path());
    fs::write(source.path().join("tokenizer.json"), byte_tokenizer()).unwrap();
    let folder = converted(source.path());
    if with_predictors {
        let sentences = "It was a bright cold day, and the clocks were striking. ".repeat(60);
        let path = source.path().join("text.txt");
        fs::write(&path, sentences).unwrap();
        let fit = [
            "predictor",
            "fit",
            text(folder.path()),
            "--text",
            text(&path),
            "--rank",
            "8",
        ];
        wick(&fit, b"").is_success("predictor fit");
    }
    folder
}
