//! `wick convert ORG/NAME`: downloads from a small hub on this machine, whole, broken off, refused and offline.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{converted, fixture};

mod answers;
mod broken;
mod server;

use server::{Asked, Server, COMMIT, REPO};

const WEIGHTS: &str = "model.safetensors";

/// A home for the cache and a folder to write.
struct Place {
    root: tempfile::TempDir,
}

/// How a command ended and what it said.
struct Said {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Place {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("home")).unwrap();
        Self { root }
    }

    fn home(&self) -> PathBuf {
        self.root.path().join("home")
    }

    fn out(&self) -> PathBuf {
        self.root.path().join("out")
    }

    /// The model's folder in the cache.
    fn cached(&self, path: &str) -> PathBuf {
        let folder = format!("hub/models--{}", REPO.replace('/', "--"));
        self.home().join(folder).join(path)
    }

    fn command(&self, endpoint: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
        command.args(["convert", REPO]).arg(self.out()).args(flags);
        for proxy in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"] {
            command.env_remove(proxy).env_remove(proxy.to_lowercase());
        }
        command.env_remove("HF_TOKEN").current_dir(self.root.path());
        command
            .env("HF_ENDPOINT", endpoint)
            .env("HF_HOME", self.home());
        command
    }

    fn convert(&self, server: &Server, flags: &[&str]) -> Said {
        said(&mut self.command(&server.endpoint(), flags))
    }

    /// The result is that of converting the folder itself.
    fn is_conversion_of(&self, source: &Path) {
        assert!(
            snapshot(&self.out()) == snapshot(converted(source).path()),
            "other bytes"
        );
    }
}

fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap();
    Said {
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

impl Said {
    fn is_success(&self) -> &Self {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        self
    }

    /// One sentence, status 1, with every one of `parts` in it.
    fn is_refusal(&self, parts: &[&str]) {
        let stderr = &self.stderr;
        assert_eq!(
            (self.status, stderr.lines().count()),
            (Some(1), 1),
            "{parts:?}: {stderr}"
        );
        assert!(
            stderr.starts_with("wick: ") && !stderr.contains("panicked"),
            "{stderr}"
        );
        for part in parts {
            assert!(stderr.contains(part), "no {part:?} in {stderr}");
        }
    }
}

fn snapshot(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let content = |entry: fs::DirEntry| {
        (
            entry.file_name().into_string().unwrap(),
            fs::read(entry.path()).unwrap(),
        )
    };
    entries.map(content).collect()
}

/// A server with a fixture, and with files and names that nobody may want.
fn serve(name: &str, others: &[&str], phantoms: &[&str]) -> Server {
    let mut files = snapshot(&fixture(name));
    files.extend(
        others
            .iter()
            .map(|&name| (name.to_owned(), b"not this one".to_vec())),
    );
    Server::start(files, phantoms, "main")
}

/// Where the downloads of a file started, looks at its size left out.
fn starts(asked: &[Asked], name: &str) -> Vec<usize> {
    let of_file = asked
        .iter()
        .filter(|asked| asked.path == format!("/elsewhere/{name}"));
    let ranges = of_file.filter_map(|asked| asked.range);
    ranges
        .filter(|&(_, has_end)| !has_end)
        .map(|(start, _)| start)
        .collect()
}

#[test]
fn a_model_is_converted_as_its_folder_is() {
    let others = [
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "optimizer.bin",
        "a.gguf",
    ];
    let hostile = [
        "../../evil.safetensors",
        "/etc/config.json",
        "onnx/model.safetensors",
        "a\\b.bin",
        "",
    ];
    let server = serve("opt-pre-ln", &others, &hostile);
    let place = Place::new();
    let said = place.convert(&server, &[]);
    said.is_success();
    let snapshot_path = place.cached(&format!("snapshots/{COMMIT}"));
    assert!(
        said.stdout.contains(snapshot_path.to_str().unwrap()),
        "{}",
        said.stdout
    );
    place.is_conversion_of(&fixture("opt-pre-ln"));
    let mut names: Vec<String> = snapshot(&snapshot_path).into_keys().collect();
    names.sort();
    assert_eq!(names, ["config.json", WEIGHTS]);
    assert_eq!(
        fs::read_to_string(place.cached("refs/main")).unwrap(),
        COMMIT
    );
    for asked in server.asked() {
        let wanted = ["/revision/main", "/config.json", &format!("/{WEIGHTS}")];
        assert!(
            wanted.iter().any(|wanted| asked.path.ends_with(wanted)),
            "{asked:?}"
        );
    }
    // A second time only sizes are compared.
    place.convert(&server, &[]).is_success();
    let again = server.asked();
    assert!(
        again.len() > 1 && starts(&again, WEIGHTS).is_empty(),
        "{again:?}"
    );
    // Another snapshot brought the blob already.
    fs::remove_dir_all(place.cached("snapshots")).unwrap();
    place.convert(&server, &[]).is_success();
    assert!(starts(&server.asked(), WEIGHTS).is_empty());
    place.is_conversion_of(&snapshot_path);
}

#[test]
fn shards_at_a_revision() {
    let files = snapshot(&fixture("llama-relu-gqa-f16"));
    let server = Server::start(files, &[], "refs%2Fpr%2F1");
    let place = Place::new();
    place.convert(&server, &[]).is_refusal(&[
        REPO,
        "no revision `main`",
        "404",
        "spelling",
        "no local",
    ]);
    place
        .convert(&server, &["--revision", "refs/pr/1"])
        .is_success();
    place.is_conversion_of(&fixture("llama-relu-gqa-f16"));
    assert!(place.cached("refs/refs/pr/1").is_file());
    for bad in ["../../x", "a b", "", "%2e"] {
        place
            .convert(&server, &["--revision", bad])
            .is_refusal(&[bad, "branch, tag or commit"]);
    }
}

#[test]
fn gguf_files_are_asked_for_by_name() {
    let mut files = BTreeMap::new();
    for name in ["tiny-q4.gguf", "tiny-q8.gguf"] {
        files.insert(name.to_owned(), vec![1; 5000]);
    }
    let server = Server::start(files, &["folder/tiny.gguf"], "main");
    let place = Place::new();
    place
        .convert(&server, &[])
        .is_refusal(&[REPO, "--file", "tiny-q4.gguf, tiny-q8.gguf"]);
    place
        .convert(&server, &["--file", "other.gguf"])
        .is_refusal(&["other.gguf", "tiny-q4.gguf"]);
    server.asked();
    // These are no weights, which is for the conversion to say.
    let said = place.convert(&server, &["--file", "tiny-q8.gguf"]);
    said.is_refusal(&["tiny-q8.gguf"]);
    let asked = server.asked();
    assert_eq!(starts(&asked, "tiny-q8.gguf"), [0]);
    assert!(!asked
        .iter()
        .any(|asked| asked.path.contains("q4") || asked.path.contains("folder")));
}

#[test]
fn what_cannot_be_converted_is_not_downloaded() {
    let mut files = snapshot(&fixture("opt-pre-ln"));
    files.insert(
        "config.json".to_owned(),
        br#"{"model_type": "word2vec"}"#.to_vec(),
    );
    let server = Server::start(files, &[], "main");
    let place = Place::new();
    place
        .convert(&server, &[])
        .is_refusal(&[REPO, "word2vec", "not supported", "not downloaded"]);
    assert!(!server
        .asked()
        .iter()
        .any(|asked| asked.path.ends_with(WEIGHTS)));
    let server = Server::start(BTreeMap::new(), &["README.md"], "main");
    place
        .convert(&server, &[])
        .is_refusal(&[REPO, "no weights", "safetensors", "GGUF"]);
}

#[test]
fn a_local_path_comes_first() {
    let server = serve("opt-pre-ln", &[], &[]);
    let place = Place::new();
    let local = place.root.path().join(REPO);
    fs::create_dir_all(&local).unwrap();
    for (name, bytes) in snapshot(&fixture("opt-pre-ln")) {
        fs::write(local.join(name), bytes).unwrap();
    }
    for flag in ["--revision", "--file"] {
        place
            .convert(&server, &[flag, "x"])
            .is_refusal(&[flag, REPO, "local path"]);
    }
    place.convert(&server, &[]).is_success();
    place.is_conversion_of(&fixture("opt-pre-ln"));
    assert!(server.asked().is_empty());

    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    let neither = said(command.args(["convert", "no/such/folder"]).arg(place.out()));
    neither.is_refusal(&["no/such/folder does not exist", "hub", "facebook/opt-125m"]);
}
