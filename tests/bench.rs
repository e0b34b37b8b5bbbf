//! `wick bench io` as it is called: its figures in JSON and as a table, and what it refuses.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::demo::demo;

fn bench_io(path: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wick"));
    command.args(["bench", "io"]).arg(path).args(flags);
    command.output().unwrap()
}

/// 64 MiB that are not all alike.
fn large_file(folder: &tempfile::TempDir) -> std::path::PathBuf {
    let path = folder.path().join("large.bin");
    let bytes: Vec<u8> = (0..64u32 << 20).map(|at| (at >> 9) as u8).collect();
    fs::write(&path, bytes).unwrap();
    path
}

const TINY: [&str; 6] = [
    "--size",
    "16KiB,4MiB",
    "--in-flight",
    "1,8",
    "--seconds",
    "0.05",
];

#[test]
fn cells_are_named_and_say_what_was_effective() {
    let folder = tempfile::tempdir().unwrap();
    let path = large_file(&folder);
    let output = bench_io(&path, &[&TINY[..], &["--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("cells of 0.05 s"), "{stderr}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["file_bytes"], 64 << 20);
    assert_eq!(json["file"], path.to_str().unwrap());
    let strings = |name: &str, field: Option<&str>| -> Vec<String> {
        let list = json[name].as_array().unwrap().iter();
        let string = |value: &Value| value.as_str().unwrap().to_owned();
        list.map(|value| string(field.map_or(value, |field| &value[field])))
            .collect()
    };
    let (ways, engines) = (strings("accesses", Some("io")), strings("engines", None));
    // What a system refuses is left out, and said.
    assert_eq!(
        ways.len() + engines.len() + strings("left_out", None).len(),
        4
    );
    assert!(ways.contains(&"buffered".to_owned()) && engines.contains(&"pool".to_owned()));
    for access in json["accesses"].as_array().unwrap() {
        let effective = access["effective"].as_str().unwrap();
        assert!(
            effective.starts_with(access["io"].as_str().unwrap()),
            "{access}"
        );
        assert_eq!(
            access["cache_dropped"].is_boolean(),
            access["io"] == "buffered"
        );
        let alignment_bytes = access["alignment_bytes"].as_u64().unwrap();
        assert_eq!(alignment_bytes == 1, access["io"] == "buffered");
    }
    let cells = json["cells"].as_array().unwrap();
    assert_eq!(cells.len(), ways.len() * engines.len() * 4);
    for cell in cells {
        let of = |name: &str| cell[name].as_str().unwrap();
        let large = cell["read_bytes"] == 4 << 20;
        let size = if large { "4MiB" } else { "16KiB" };
        let name = format!("{}/{}/{size}/{}", of("io"), of("engine"), cell["in_flight"]);
        assert_eq!(of("name"), name);
        let request_bytes = cell["request_bytes"].as_f64().unwrap();
        let expected = if large { 512.0 * 1024.0 } else { 16384.0 };
        assert!((0.9..1.1).contains(&(request_bytes / expected)), "{cell}");
        for figure in ["mb_per_s", "requests_per_s", "cpu_us_per_request"] {
            let [min, median, max] =
                ["min", "median", "max"].map(|part| cell[figure][part].as_f64().unwrap());
            assert!(0.0 < min && min <= median && median <= max, "{cell}");
        }
        // Two figures of the same rounds.
        let rates =
            ["mb_per_s", "requests_per_s"].map(|name| cell[name]["median"].as_f64().unwrap());
        assert!(
            (0.8..1.25).contains(&(rates[0] * 1e6 / rates[1] / request_bytes)),
            "{cell}"
        );
    }
}

#[test]
fn the_table_has_a_row_and_the_picture_a_mark_for_each_setting() {
    let folder = tempfile::tempdir().unwrap();
    let path = large_file(&folder);
    let pictures = folder.path().join("pictures");
    let flags = ["--io", "buffered", "--engine", "pool", "--out"];
    let flags = [&TINY[..], &flags, &[pictures.to_str().unwrap()]].concat();
    let output = bench_io(&path, &flags);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{table}");
    for part in [
        "large.bin, 64.0 MiB",
        "buffered",
        "| read | in flight | pool MB/s |",
    ] {
        assert!(table.contains(part), "{table}");
    }
    let rows = |start: &str| table.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!(
        [rows("| 16 KiB | "), rows("| 4 MiB as 512.0 KiB | ")],
        [2, 2],
        "{table}"
    );
    let svg = fs::read_to_string(pictures.join("io-buffered-pool.svg")).unwrap();
    for part in ["1 in flight", "8 in flight", "MB/s", "KiB", "</svg>"] {
        assert!(svg.contains(part), "{svg}");
    }
    let png = fs::read(pictures.join("io-buffered-pool.png")).unwrap();
    assert!(png.starts_with(b"\x89PNG"));
    assert_eq!(fs::read_dir(&pictures).unwrap().count(), 2);
}

#[test]
fn what_cannot_be_measured_is_one_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.bin");
    fs::write(&short, vec![1; 1 << 20]).unwrap();
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let converted = demo();
    for (path, parts) in [
        (&*short, ["short.bin", "1.0 MiB are too few"]),
        (
            &*folder.path().join("none.bin"),
            ["none.bin", "No such file"],
        ),
        (&*empty, ["empty", "not a converted folder"]),
        (Path::new("/dev/null"), ["/dev/null", "file"]),
        // The largest file with records is found, and shorter than it takes.
        (converted.path(), [".safetensors: ", "too few"]),
    ] {
        let output = bench_io(path, &TINY);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(output.stdout.is_empty());
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(parts.iter().all(|part| stderr.contains(part)), "{stderr}");
    }
}
