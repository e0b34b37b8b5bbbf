//! `wick bench prompt` as it is called: what its rows hold, and what it refuses.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

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
        "--text-file",
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
    assert_eq!(
        (rows.len(), &bench["cache_policy"]),
        (3, &Value::from("lfu"))
    );
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

    let flags = [
        "--tokens",
        "8",
        "--text-file",
        TEXT,
        "--cache-policy",
        "lru",
    ];
    let table = prompt(model.path(), &flags);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    for part in ["real weights", ", cache lru\n", "\n| 8 | "] {
        assert!(table.contains(part), "{table}");
    }
}

/// Starts a run over many prompts and waits until the first one was measured; gives what is still to be said on stderr.
fn started(model: &Path) -> (Child, BufReader<std::process::ChildStderr>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    command.args(["bench", "prompt"]).arg(model);
    command.args(["--tokens", "4,5,6,7,8,9", "--text-file", TEXT]);
    let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    let mut progress = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("4 tokens: ") {
        line.clear();
        assert!(progress.read_line(&mut line).unwrap() > 0, "no prompt");
    }
    (child, progress)
}

/// What becomes of a run: its exit status, the table, and the rest of stderr.
fn ended(
    child: Child,
    mut progress: BufReader<std::process::ChildStderr>,
) -> (i32, String, String) {
    let mut stderr = String::new();
    progress.read_to_string(&mut stderr).unwrap();
    let output = child.wait_with_output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    (output.status.code().unwrap(), table, stderr)
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_what_is_there() {
    let model = demo();
    let (child, progress) = started(model.path());
    let pid = child.id().to_string();
    let mut kill = Command::new("kill");
    assert!(kill.args(["-INT", &pid]).status().unwrap().success());
    let (status, table, stderr) = ended(child, progress);
    assert_eq!(status, 130, "{stderr}");
    assert!(
        table.contains("| 4 | ") && !table.contains("| 9 | "),
        "{table}"
    );
    assert!(table.contains("interrupted: "), "{table}");
}

#[test]
fn a_prompt_that_fails_leaves_the_others() {
    let model = demo();
    let (child, progress) = started(model.path());
    // The program itself has everything open; the processes of the next prompts have not.
    std::fs::remove_file(model.path().join("wick.json")).unwrap();
    let (status, table, stderr) = ended(child, progress);
    assert_eq!(status, 1, "{stderr}");
    assert!(
        table.contains("| 4 | ") && !table.contains("| 9 | "),
        "{table}"
    );
    assert!(
        stderr.contains("wick: 9 tokens: ") && stderr.contains("wick.json"),
        "{stderr}"
    );
}

#[test]
fn nonsense_is_refused_by_name() {
    let model = demo();
    for (flags, reason) in [
        (&["--tokens", "8"][..], "--text-file FILE"),
        (&["--tokens", "0", "--text-file", TEXT], "at least 1"),
        (
            &["--tokens", "8", "--text-file", "no/such/file"],
            "no/such/file",
        ),
        (
            &["--tokens", "99999", "--text-file", TEXT],
            "no prompt fits",
        ),
        (
            &["--tokens", "8", "--text-file", TEXT, "--memory", "1KiB"],
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
