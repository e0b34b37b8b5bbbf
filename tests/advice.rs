//! What `wick` says of a machine and a model before and beside running it: `plan --predict`, `tune`, `doctor`.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::demo::demo;
use crate::support::{converted, field, fixture, json, text, wick};

fn call(command: &str, path: &Path, flags: &[&str]) -> Output {
    wick(&[&[command, text(path)][..], flags].concat())
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn figures(command: &str, path: &Path, flags: &[&str]) -> Value {
    json(&[&[command, text(path)][..], flags].concat())
}

fn number(figures: &Value, name: &str) -> f64 {
    let value = figures[name].as_f64();
    value.unwrap_or_else(|| panic!("{name} of {figures}"))
}

#[test]
fn predictions_are_whole_and_finite() {
    let (relu, silu) = (demo(), converted(&fixture("llama-2-silu")));
    for (path, flags) in [
        (
            relu.path(),
            &["--memory", "60%", "--prompt-tokens", "5"][..],
        ),
        (relu.path(), &["--memory", "50%", "--selector", "dense"]),
        (relu.path(), &["--memory", "100%"]),
        (silu.path(), &["--memory", "100%"]),
    ] {
        let plan = figures("plan", path, &[flags, &["--predict"]].concat());
        let figures = &plan["prediction"];
        let parts =
            ["io_ms", "memory_ms", "compute_ms", "other_ms"].map(|name| number(figures, name));
        let token_ms = number(figures, "token_ms");
        assert!(parts.iter().all(|part| *part >= 0.0), "{figures}");
        assert!(parts.iter().sum::<f64>() >= 0.99 * token_ms, "{figures}");
        for name in [
            "load_s",
            "first_token_ms",
            "tokens_per_s",
            "token_ms",
            "head_ms",
            "selected",
        ] {
            let value = number(figures, name);
            assert!(value.is_finite() && value > 0.0, "{name}: {figures}");
        }
        assert!(number(figures, "selected") <= 1.0 && number(figures, "missed") <= 1.0);
        let misses = number(figures, "missed") > 0.0;
        assert_eq!(misses, !flags.contains(&"100%"), "{figures}");
        assert!(number(&plan, "total_bytes") > 0.0);
    }
    let without = figures("plan", relu.path(), &[]);
    assert_eq!(without.get("prediction"), None);
}

#[test]
fn predictions_say_what_cannot_be() {
    let folder = demo();
    for (flags, part) in [
        (&["--predict", "--memory", "1MiB"][..], "floor"),
        (
            &["--predict", "--ctx", "32", "--prompt-tokens", "33"],
            "context of 32",
        ),
        (&["--prompt-tokens", "3"], "--predict"),
    ] {
        let output = call("plan", folder.path(), flags);
        assert!(!output.status.success());
        assert!(said(&output).contains(part), "{}", said(&output));
    }
}

const PLAIN: [&str; 8] = [
    "--memory",
    "60%",
    "-n",
    "12",
    "-p",
    "It was a dark",
    "--temperature",
    "0",
];

/// Puts `settings` beside the model as if they had been found on this machine and disk, which `doctor` names.
fn put_settings(folder: &Path, settings: &str) {
    let machine = figures("doctor", folder, &["--no-probe"]);
    let disk = machine["findings"][0]["found"].as_str().unwrap();
    let disk = disk.split(", ").next().unwrap();
    let text = format!(
        r#"{{"version":1,"place":{{"processor":{},"cpus":{},"disk":"{disk}"}},"settings":{settings},
        "gain":{{"memory":"60%","date":"2026-11-30","default_ms":2.0,"tuned_ms":1.0}}}}"#,
        machine["machine"]["processor"], machine["machine"]["cpus"]
    );
    std::fs::write(folder.join("tune.json"), text).unwrap();
}

#[test]
fn tuned_settings_are_used_named_and_change_no_text() {
    let folder = demo();
    let before = figures("run", folder.path(), &PLAIN);
    assert!(field(&before, "tuned").is_null());
    put_settings(
        folder.path(),
        r#"{"io_threads":3,"io_engine":"pool","gap_bytes":0,"threads":1,"window_tokens":4}"#,
    );
    let after = figures("run", folder.path(), &PLAIN);
    let expected = "3 in flight, pool, gap limit 0 B, 1 compute threads, window 4";
    assert_eq!(after["tuned"], expected);
    assert_eq!(field(&before, "ids"), field(&after, "ids"));
    let plan = figures("plan", folder.path(), &["--memory", "60%"]);
    assert_eq!(
        (&plan["tuned"], &plan["window_tokens"]),
        (&after["tuned"], &Value::from(4))
    );
    let output = call("run", folder.path(), &PLAIN);
    assert!(
        said(&output).contains("tuned     3 in flight"),
        "{}",
        said(&output)
    );
    // Flags go before it.
    let flags = [
        "--io-threads",
        "5",
        "--window",
        "6",
        "--threads",
        "2",
        "--io-engine",
        "pool",
    ];
    let flagged = figures("run", folder.path(), &[&PLAIN[..], &flags].concat());
    assert_eq!(flagged["tuned"], "gap limit 0 B");
    assert_eq!(field(&before, "ids"), field(&flagged, "ids"));
}

/// A measurement is there to be repeated, also where nobody tuned.
#[test]
fn benches_take_no_notice_of_tuned_settings() {
    let folder = demo();
    put_settings(folder.path(), r#"{"io_engine":"io_uring","io_threads":3}"#);
    let flags = [
        "bench", "decode", "--rows", "all", "--tokens", "1", "--json",
    ];
    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    let output = command.args(flags).arg(folder.path()).output().unwrap();
    let text = said(&output);
    assert!(output.status.success() && !text.contains("tuned"), "{text}");
    let bench: Value = serde_json::from_slice(&output.stdout).unwrap();
    let reads = bench["rows"][0]["reads"].as_str().unwrap();
    assert!(reads.ends_with(", pool"), "{reads}");
}

#[test]
fn settings_that_do_not_count_are_ignored_with_a_sentence() {
    let folder = demo();
    let before = figures("run", folder.path(), &PLAIN);
    for (settings, part) in [
        (r#"{"io_threads":0}"#, "io_threads is 0"),
        (r#"{"threads":99999999}"#, "threads is 99999999"),
        (r#"{"fast":true}"#, "unknown field"),
        ("[", "line"),
    ] {
        put_settings(folder.path(), settings);
        let output = call("run", folder.path(), &[&PLAIN[..], &["--json"]].concat());
        assert!(output.status.success());
        let (text, after) = (
            said(&output),
            serde_json::from_slice::<Value>(&output.stdout).unwrap(),
        );
        assert!(
            text.contains("tune.json is ignored") && text.contains(part),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1, "{text}");
        assert_eq!(
            (&after["tuned"], &after["ids"]),
            (&Value::Null, &before["ids"])
        );
    }
}

#[test]
fn tuning_ends_and_stores_only_what_it_says() {
    let folder = demo();
    let outcome = figures(
        "tune",
        folder.path(),
        &["--memory", "60%", "--seconds", "4"],
    );
    let stored = folder.path().join("tune.json").exists();
    assert_eq!(outcome["is_stored"], stored, "{outcome}");
    assert!(outcome["duels"].as_u64().unwrap() > 0, "{outcome}");
    let after = figures("run", folder.path(), &PLAIN);
    assert_eq!(after["tuned"].is_string(), stored);
    let output = call("tune", &folder.path().join("nowhere"), &[]);
    assert!(!output.status.success() && said(&output).contains("no such folder"));
}

#[test]
fn settings_stay_until_others_were_tried() {
    let folder = demo();
    let file = folder.path().join("tune.json");
    put_settings(folder.path(), r#"{"io_threads":3}"#);
    let before = std::fs::read(&file).unwrap();
    let memory = ["--memory", "60%", "--seconds"];
    let nothing = [&memory[..], &["0.001"]].concat();
    let outcome = figures("tune", folder.path(), &nothing);
    assert_eq!(
        (&outcome["duels"], &outcome["is_stored"]),
        (&0.into(), &false.into())
    );
    assert_eq!(outcome["is_removed"], false);
    assert_eq!(std::fs::read(&file).unwrap(), before);
    let output = call("tune", folder.path(), &nothing);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("no settings were tried") && text.contains("left as it was"),
        "{text}"
    );
    // A context of a few tokens is enough.
    let outcome = figures(
        "tune",
        folder.path(),
        &[&memory[..], &["4", "--ctx", "4"]].concat(),
    );
    assert!(outcome["duels"].as_u64().unwrap() > 0, "{outcome}");
    let is = |key: &str| outcome[key].as_bool().unwrap();
    assert!(!(is("is_stored") && is("is_removed")), "{outcome}");
    assert_eq!(file.exists(), !is("is_removed"));
    // Time that ended before the settings did says nothing against those of before.
    let after = std::fs::read(&file).ok();
    assert_eq!(after == Some(before), !is("is_stored") && !is("is_removed"));
}

#[test]
fn the_doctor_looks_at_everything_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let checkup = figures("doctor", folder.path(), &["--no-probe"]);
    let findings = checkup["findings"].as_array().unwrap();
    let names: Vec<&str> = findings
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    for name in [
        "disk",
        "direct I/O",
        "io_uring",
        "memory",
        "memory cgroup",
        "locked memory",
        "large pages",
    ] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(
        names.ends_with(&["instructions", "processors", "load"]),
        "{names:?}"
    );
    for finding in findings {
        let warns = finding["status"] == "warn";
        assert!(warns || finding["status"] == "ok", "{finding}");
        assert_eq!(field(finding, "advice").is_string(), warns, "{finding}");
    }
    assert!(field(&checkup, "rates").is_null());
    assert!(checkup["machine"]["cpus"].as_u64().unwrap() > 0);
    let output = call("doctor", folder.path(), &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    for line in ["reads in order", "reads at random", "memory reads"] {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let output = call("doctor", &folder.path().join("nowhere"), &[]);
    assert!(!output.status.success() && said(&output).contains("no such file or folder"));
}
