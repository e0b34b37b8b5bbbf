//! `wick bench prompt` as it is called: what its rows hold, and what it refuses.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::demo::demo;

fn prompt(path: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    command.args(["bench", "prompt"]).arg(path).args(flags);
    command.output().unwrap()
}

const TEXT: &str = "assets/opt-9m/heldout.txt";

#[test]
fn longer_prompts_read_more_but_less_for_each_token() {
    let model = demo();
    let flags = [
        "--tokens",
        "4,64,200,9999999",
        "--text",
        TEXT,
        "--memory",
        "70%",
        "--json",
    ];
    let output = prompt(model.path(), &flags);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("9999999 tokens: left out"), "{stderr}");
    let bench: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = bench["rows"].as_array().unwrap();
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap();
    let ffn_bytes = number(&bench, "ffn_bytes");
    assert_eq!(rows.len(), 3, "{bench}");
    for (row, (tokens, chunks)) in rows.iter().zip([(4, 1.0), (64, 1.0), (200, 2.0)]) {
        assert_eq!(row["tokens"], tokens);
        let (selected, union) = (number(row, "selected"), number(row, "union"));
        assert!(
            0.0 < selected && selected < union && union <= chunks,
            "{row}"
        );
        let peak = number(row, "peak_bytes");
        assert!(
            row["in_cgroup"] != true || peak <= number(row, "budget_bytes"),
            "{row}"
        );
        assert!(number(row, "compute_ms_per_token") > 0.0 && number(row, "decode_ms") > 0.0);
    }
    // Of a cold cache, one chunk reads its union, and the gaps between these small records: at most the whole FFN.
    for row in &rows[..2] {
        let read = number(row, "bytes_read") / ffn_bytes;
        assert!(read > 0.99 * number(row, "union") && read < 1.05, "{row}");
    }
    let per_token = |row: &Value| number(row, "bytes_read") / number(row, "tokens");
    assert!(per_token(&rows[1]) < 0.5 * per_token(&rows[0]));

    let table = prompt(model.path(), &["--tokens", "8", "--text", TEXT]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(
        table.contains("real weights") && table.contains("\n| 8 | "),
        "{table}"
    );
}

#[test]
fn nonsense_is_refused_by_name() {
    let model = demo();
    for (flags, reason) in [
        (&["--tokens", "8"][..], "--text FILE"),
        (&["--tokens", "0", "--text", TEXT], "at least 1"),
        (&["--tokens", "8", "--text", "no/such/file"], "no/such/file"),
        (&["--tokens", "99999", "--text", TEXT], "no prompt fits"),
        (
            &["--tokens", "8", "--text", TEXT, "--memory", "1KiB"],
            "floor",
        ),
    ] {
        let output = prompt(model.path(), flags);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && stderr.contains(reason),
            "{flags:?}: {stderr}"
        );
    }
}
