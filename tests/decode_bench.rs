//! `wick bench decode` as it is called: what its rows read and keep, and what it refuses.

use std::path::Path;

use serde_json::Value;

use crate::demo::demo;
use crate::support::{converted, fixture, json, refused, text};

fn decode(path: &Path, flags: &[&str]) -> Value {
    json(&[&["bench", "decode", text(path)][..], flags].concat())
}

fn number(row: &Value, name: &str) -> f64 {
    row[name]
        .as_f64()
        .unwrap_or_else(|| panic!("{name} of {row}"))
}

fn names(bench: &Value) -> Vec<&str> {
    let rows = bench["rows"].as_array().unwrap();
    rows.iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect()
}

#[test]
fn each_row_reads_and_keeps_what_its_name_says() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("synthetic");
    let shape = ["--like", "opt-125m", "--layers", "10"];
    json(&[&["synth", text(&out)][..], &shape].concat());
    let flags = ["--memory", "80%", "--ctx", "64", "--tokens", "5"];
    let bench = decode(&out, &flags);
    assert_eq!(bench["synthetic"], "opt-125m");
    let expected = [
        "naive",
        "hybrid",
        "+selector",
        "+window",
        "+bundling",
        "all",
        "+lookahead",
        "dense in DRAM",
    ];
    assert_eq!(names(&bench), expected);
    let rows = bench["rows"].as_array().unwrap();
    for row in rows {
        let (total, floor) = (number(row, "total_ms"), number(row, "floor_ms"));
        assert!(total > 0.0 && floor > 0.0, "{row}");
        let parts = ["io_ms", "memory_ms", "compute_ms"].map(|name| number(row, name));
        assert!(parts.iter().all(|part| *part >= 0.0), "{row}");
        if let (Some(peak), true) = (row["peak_bytes"].as_u64(), row["in_cgroup"] == true) {
            assert!(peak <= row["budget_bytes"].as_u64().unwrap(), "{row}");
        }
    }
    let [naive, hybrid, selector, window, bundling, all, ahead, dense] = &rows[..] else {
        panic!("{rows:?}");
    };
    let read = |row| number(row, "bytes_per_token");
    let whole = number(dense, "dram_bytes");
    // Positions and norms are looked up or stay; record padding comes on top.
    assert!(
        read(naive) > 0.95 * whole && read(naive) < 1.1 * whole,
        "{naive}"
    );
    assert!(
        read(hybrid) > 0.1 * whole && read(hybrid) < 0.5 * read(naive),
        "{hybrid}"
    );
    assert!(
        read(selector) < 0.5 * read(hybrid) && read(selector) > 0.0,
        "{selector}"
    );
    assert!(read(window) < 0.8 * read(selector), "{window}");
    // The same selections: parts of the method change times only, and guesses read more.
    assert_eq!(number(window, "missed"), number(bundling, "missed"));
    assert_eq!(number(bundling, "missed"), number(all, "missed"));
    assert_eq!(number(all, "ahead_read"), 0.0);
    assert!(
        number(ahead, "ahead_used") > 0.0 && read(ahead) > 0.0,
        "{ahead}"
    );
    for row in [selector, window, bundling, all] {
        let selected = number(row, "selected");
        assert!((0.08..0.12).contains(&selected), "{row}");
    }
}

#[test]
fn a_real_model_uses_its_own_selector_and_reads_nothing_when_it_fits() {
    let out = demo();
    let mut flags = vec!["--memory", "100%", "--rows", "all", "--tokens", "10"];
    flags.extend(["--cache-policy", "lru"]);
    let bench = decode(out.path(), &flags);
    assert_eq!(bench["cache_policy"], "lru");
    assert_eq!(
        (&bench["synthetic"], names(&bench)),
        (&Value::Null, vec!["all"])
    );
    let row = &bench["rows"][0];
    assert_eq!(number(row, "bytes_per_token"), 0.0);
    assert!(number(row, "selected") < 0.5, "{row}");
}

#[test]
fn rows_that_cannot_be_are_left_out_or_refused() {
    let out = converted(&fixture("llama-2-silu"));
    let refused = |path: &Path, flags: &[&str], part: &str| {
        let said = refused(
            &[&["bench", "decode", text(path)][..], flags].concat(),
            &[part],
        );
        assert!(!said.contains("panicked"), "{said}");
    };
    refused(
        out.path(),
        &["--rows", "fastest"],
        "no row is called \"fastest\"",
    );
    refused(out.path(), &["--rows", "all"], "no row is left to measure");
    refused(out.path(), &["--memory", "0%"], "amount of memory");
    refused(&out.path().join("nowhere"), &[], "no such folder");
}
