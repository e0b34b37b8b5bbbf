//! `wick bench sweep` as it is called: what its points hold, its pictures, and what it refuses.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::demo::demo;
use crate::support::{converted, fixture};

fn sweep(path: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    command.args(["bench", "sweep"]).arg(path).args(flags);
    command.output().unwrap()
}

fn swept(path: &Path, flags: &[&str]) -> Value {
    let output = sweep(path, &[flags, &["--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    // Progress: every step is told.
    assert!(stderr.contains("1 of "), "{stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn points(bench: &Value) -> &[Value] {
    let points = bench["points"].as_array().unwrap();
    for point in points {
        let number = |name: &str| point[name].as_f64().unwrap();
        assert!(number("total_ms_min") <= number("total_ms"), "{point}");
        assert!(number("total_ms") <= number("total_ms_max"), "{point}");
        assert!(point["reads"].as_str().unwrap().contains(", "), "{point}");
        let (peak, budget) = (number("peak_bytes"), number("budget_bytes"));
        assert!((number("used") - peak / budget).abs() < 1e-9, "{point}");
        if point["in_cgroup"] == true {
            assert!(peak <= budget, "{point}");
        }
    }
    points
}

fn numbers(points: &[Value], name: &str) -> Vec<f64> {
    let number = |point: &Value| point[name].as_f64().unwrap();
    points.iter().map(number).collect()
}

/// Both pictures of a sweep, and nothing else in the folder.
fn check_pictures(folder: &Path, stem: &str) {
    let svg = std::fs::read_to_string(folder.join(format!("{stem}.svg"))).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("ms per token") && svg.contains("MB read per token"));
    let png = std::fs::read(folder.join(format!("{stem}.png"))).unwrap();
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.ends_with(b"IEND\xae\x42\x60\x82"));
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 2);
}

#[test]
fn budgets_go_from_the_floor_to_all_of_the_model() {
    let (model, out) = (demo(), tempfile::tempdir().unwrap());
    let pictures = out.path().join("new/folder");
    let flags = [
        "--over",
        "memory",
        "--points",
        "3",
        "--tokens",
        "4",
        "--out",
        pictures.to_str().unwrap(),
    ];
    let bench = swept(model.path(), &flags);
    assert_eq!(
        (&bench["over"], &bench["synthetic"]),
        (&Value::from("memory"), &Value::Null)
    );
    let points = points(&bench);
    let budgets = numbers(points, "budget_bytes");
    assert_eq!(budgets, numbers(points, "value"));
    assert!(
        budgets.is_sorted() && budgets[0] < budgets[2],
        "{budgets:?}"
    );
    let fits: Vec<bool> = points.iter().map(|point| point["fits"] == true).collect();
    assert_eq!(fits, [false, false, true]);
    let read = numbers(points, "bytes_per_token");
    assert!(read[0] > 0.0 && read[2] == 0.0, "{read:?}");
    assert_eq!(points[0]["over_smaller"], Value::Null);
    let times = numbers(points, "total_ms");
    let beside = points[2]["over_smaller"].as_f64().unwrap();
    assert!((beside - times[2] / times[0].min(times[1])).abs() < 1e-9);
    // Whether they hold is for a quiet machine to say.
    let names = ["no cliff", "budgets are used"];
    let checks = bench["checks"].as_array().unwrap();
    assert!(checks.iter().map(|check| &check["name"]).eq(names.iter()));
    let name = model.path().file_name().unwrap().to_str().unwrap();
    check_pictures(&pictures, &format!("sweep-memory-{name}"));
}

#[test]
fn budgets_can_be_named() {
    let model = demo();
    let flags = [
        "--over",
        "memory",
        "--at",
        "100%,30MB",
        "--tokens",
        "2",
        "--rounds",
        "1",
    ];
    let bench = swept(model.path(), &flags);
    let budgets = numbers(points(&bench), "budget_bytes");
    assert_eq!((budgets.len(), budgets[0]), (2, 30e6));
    let output = sweep(model.path(), &flags);
    let table = String::from_utf8(output.stdout).unwrap();
    let row = |start: &str| table.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!(row("| 30 MB | "), 1, "{table}");
    assert!(
        table.contains("no cliff: ")
            && table.contains("real weights")
            && table.contains("cache lfu"),
        "{table}"
    );
}

#[test]
fn a_text_is_written_past_its_context_in_blocks() {
    let (model, out) = (demo(), tempfile::tempdir().unwrap());
    let flags = [
        "--over", "length", "--tokens", "50", "--block", "20", "--ctx", "24", "--out",
    ];
    let flags = [&flags[..], &[out.path().to_str().unwrap()]].concat();
    let bench = swept(model.path(), &flags);
    let points = points(&bench);
    let places: Vec<(&str, &str)> = points
        .iter()
        .map(|point| {
            (
                point["series"].as_str().unwrap(),
                point["name"].as_str().unwrap(),
            )
        })
        .collect();
    let blocks = ["1..20", "21..40", "41..50"];
    let expected = ["greedy", "nucleus"].map(|series| blocks.map(|block| (series, block)));
    assert_eq!(places, expected.concat());
    assert_eq!(numbers(points, "tokens"), [20.0, 20.0, 10.0].repeat(2));
    // Other tokens use other neurons.
    let missed = numbers(points, "missed");
    assert_ne!(missed[..3], missed[3..]);
    let name = model.path().file_name().unwrap().to_str().unwrap();
    check_pictures(out.path(), &format!("sweep-length-{name}"));
}

#[test]
fn windows_keep_what_they_say_and_random_weights_have_one_text() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = folder.path().join("synthetic");
    let mut synth = Command::new(env!("CARGO_BIN_EXE_wick"));
    synth.arg("synth").arg(&model);
    let flags = ["--like", "opt-125m", "--layers", "4", "-q"];
    assert!(synth.args(flags).status().unwrap().success());
    let pictures = out.path().to_str().unwrap();
    let flags = [
        "--over", "window", "--at", "1,4,none", "--memory", "90%", "--ctx", "64",
    ];
    let flags = [
        &flags[..],
        &["--tokens", "10", "--rounds", "1", "--out", pictures],
    ]
    .concat();
    let bench = swept(&model, &flags);
    assert_eq!(bench["synthetic"], "opt-125m");
    assert_eq!(bench["cache_policy"], "lfu");
    let points = points(&bench);
    let names: Vec<&str> = points
        .iter()
        .map(|point| point["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["1", "4", "none"]);
    // The same neurons are wanted, and the longer they stay, the fewer have to be read.
    let selected = numbers(points, "selected");
    assert!(
        selected.iter().all(|share| *share == selected[0]),
        "{selected:?}"
    );
    let missed = numbers(points, "missed");
    assert!(missed[0] > missed[1] && missed[1] > missed[2], "{missed:?}");
    check_pictures(out.path(), "sweep-window-opt-125m");
    let flags = [
        "--over", "length", "--tokens", "6", "--block", "3", "--ctx", "64",
    ];
    let output = sweep(&model, &flags);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("| replayed trace, 4..6 | "), "{table}");
    assert!(
        table.contains("greedy and nucleus would be the same"),
        "{table}"
    );
}

/// What was measured is shown; the exit status is that of a program that was stopped.
#[cfg(unix)]
#[test]
fn ctrl_c_keeps_what_is_there() {
    let model = demo();
    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    command.args(["bench", "sweep"]).arg(model.path());
    command.args([
        "--over", "window", "--at", "1,2", "--rounds", "1000", "--tokens", "2",
    ]);
    let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    let mut progress = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("2 of 2000") {
        line.clear();
        assert!(
            progress.read_line(&mut line).unwrap() > 0,
            "it ended by itself"
        );
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill")
        .args(["-INT", &pid])
        .status()
        .unwrap()
        .success());
    progress.read_to_string(&mut line).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{line}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(
        table.contains("interrupted: what was measured until then"),
        "{table}"
    );
    assert!(
        table.contains("| 1 | ") && table.contains("| 2 | "),
        "{table}"
    );
}

/// Flags, and a part of what is said about them.
const NONSENSE: [(&str, &str); 17] = [
    ("", "--over"),
    ("--over depth", "invalid value 'depth'"),
    ("--over memory --points 1", "must be at least 2"),
    ("--over memory --points 101", "must be at most 100"),
    ("--over memory --points 3 --at 50%", "cannot be used with"),
    ("--over memory --tokens 0", "must be at least 1"),
    ("--over memory --warmup few", "invalid value 'few'"),
    ("--over length --block 0", "must be at least 1"),
    ("--over memory --at lots", "lots"),
    ("--over memory --at 1KiB", "below the floor"),
    ("--over memory --memory 50%", "--memory has no meaning"),
    ("--over window --points 3", "--points has no meaning"),
    ("--over length --at 3", "--at has no meaning"),
    ("--over window --at 0", "--at 0: must be at least 1"),
    ("--over window --at all", "nor \"none\""),
    ("--over length --ctx 3", "no room after a prompt"),
    ("--over memory --ctx 100000", "the model's longest is 256"),
];

#[test]
fn nonsense_is_refused_in_one_sentence() {
    let refused = |path: &Path, line: &str, part: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = sweep(path, &words);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && output.stdout.is_empty(),
            "{line}: {stderr}"
        );
        assert!(
            stderr.contains(part) && !stderr.contains("panicked"),
            "{line}: {stderr}"
        );
    };
    let (model, silu) = (demo(), converted(&fixture("llama-2-silu")));
    for (line, part) in NONSENSE {
        refused(model.path(), line, part);
    }
    refused(model.path(), "--over memory --out /dev/null", "/dev/null");
    refused(
        silu.path(),
        "--over window --memory 100%",
        "no predictors in this folder",
    );
    refused(Path::new("/no/such"), "--over memory", "/no/such");
}
