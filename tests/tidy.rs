//! Rules over the repository itself: files and functions stay readable, and leftovers stay out.

use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") && !path.ends_with("fixtures") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn all_sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    for folder in ["crates", "tests", "examples"] {
        sources(&root.join(folder), &mut found);
    }
    assert!(found.len() > 50, "the search for sources is broken");
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        (path, text)
    };
    found.into_iter().map(read).collect()
}

#[test]
fn files_and_functions_are_short_and_open_with_what_they_are() {
    for (path, text) in all_sources() {
        let path = path.display();
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines.len() <= FILE_LINES_MAX,
            "{path} has {} lines",
            lines.len()
        );
        let says = lines[0].starts_with("//!") || lines[0].starts_with("#![doc");
        assert!(says, "{path} does not say what it is");
        let mut start = None;
        for (index, line) in lines.iter().enumerate() {
            let code = line.trim_start();
            let indent = line.len() - code.len();
            let words = [
                "fn ",
                "pub fn ",
                "pub(crate) fn ",
                "pub(super) fn ",
                "unsafe fn ",
            ];
            if words.iter().any(|word| code.starts_with(word)) {
                start = Some((index, indent));
            } else if let Some((first, at)) = start {
                if indent == at && code == "}" {
                    let length = index - first + 1;
                    assert!(
                        length <= FUNCTION_LINES_MAX,
                        "{path}:{} has {length} lines",
                        first + 1
                    );
                    start = None;
                }
            }
        }
    }
}

fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            documents(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// A link to a file of the repository that is not there is a promise nobody keeps.
#[test]
fn links_between_documents_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = vec![
        root.join("README.md"),
        root.join("tests/fixtures/README.md"),
    ];
    documents(&root.join("docs"), &mut found);
    let mut links = 0;
    for document in found {
        let text = std::fs::read_to_string(&document).unwrap();
        for link in text.split("](").skip(1) {
            let target = link.split([')', '#']).next().unwrap();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            links += 1;
            let place = document.parent().unwrap().join(target);
            assert!(place.exists(), "{}: {target}", document.display());
        }
    }
    assert!(links > 3, "the search for links is broken");
}

#[test]
fn no_leftovers() {
    let leftovers = [
        ["todo", "!("],
        ["dbg", "!("],
        ["FIX", "ME"],
        ["XX", "X:"],
        ["unimplemented", "!("],
    ];
    for (path, text) in all_sources() {
        for word in &leftovers {
            let word = word.concat();
            assert!(!text.contains(&word), "{} contains {word}", path.display());
        }
    }
}
