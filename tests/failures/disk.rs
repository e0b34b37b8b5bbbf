//! Disks that are full, refuse to be written, or fail in the middle of a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::convert::Place;
use super::{command, finish, snapshot, text, wick};
use crate::demo::assets;

/// A file system mounted for one test.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, options: &str) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at);
        Self::done(mount, at)
    }

    /// A folder that cannot be written, even by root.
    fn read_only(at: &Path) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", "ro,size=16k", "tmpfs"])
            .arg(at);
        Self::done(mount, at)
    }

    fn done(mut mount: Command, at: &Path) -> Option<Self> {
        let done = mount.output().is_ok_and(|output| output.status.success());
        if !done {
            eprintln!("skipped: nothing can be mounted here (needs root)");
        }
        done.then(|| Self(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _gone = Command::new("umount").arg(&self.0).status();
    }
}

/// Nothing in `out` has a final name but what is whole, and there is no manifest.
fn is_unfinished(out: &Path) {
    for name in snapshot(out).keys() {
        assert!(
            name != "wick.json" && !name.ends_with(".partial"),
            "left behind: {name}"
        );
    }
}

#[test]
fn full_disks() {
    let place = Place::of("opt-pre-ln");
    let disk = place.root.path().join("disk");
    let before = snapshot(&place.source);
    for (options, part) in [
        ("size=256k", "bytes needed"),
        ("nr_inodes=2,size=64m", "No space"),
        ("nr_inodes=4,size=64m", "no room"),
    ] {
        let Some(_mount) = Mount::tmpfs(&disk, options) else {
            return;
        };
        let out = disk.join("out");
        let said = wick(
            &["convert", text(&place.source), text(&out), "--quiet"],
            b"",
        );
        said.is_refusal(options, &[text(&out), part]);
        if out.exists() {
            is_unfinished(&out);
        }
    }
    assert!(snapshot(&place.source) == before);
}

/// What the FFNs see is kept on the disk: it is refused before the model runs, by who makes predictors and by who judges them.
#[test]
fn disks_without_room_for_what_predictors_are_made_from() {
    let root = tempfile::tempdir().unwrap();
    let disk = root.path().join("disk");
    let Some(_mount) = Mount::tmpfs(&disk, "size=40m") else {
        return;
    };
    let (model, source) = (disk.join("model"), assets());
    wick(&["convert", text(&source), text(&model), "--quiet"], b"").is_success("convert");
    let before = snapshot(&model);
    let long = source.join("calibration.txt");
    for command in ["fit", "gate", "train"] {
        let words = [
            "predictor",
            command,
            text(&model),
            "--text-file",
            text(&long),
        ];
        // 65,536 tokens of 256 values of 4 bytes in 6 layers.
        let parts = [text(&model), "has room for", "65536 tokens", "402653184"];
        wick(&words, b"").is_refusal(command, &parts);
    }
    assert!(snapshot(&model) == before);
    let mut eval = command(&format!("TMPDIR={}; export TMPDIR;", text(&disk)));
    eval.args(["predictor", "eval", text(&model), "--selector", "oracle"]);
    eval.args(["--text-file", text(&long), "--tokens", "20480"]);
    finish(eval, b"").is_refusal("eval", &[text(&disk), "20480 tokens", "125829120"]);
}

#[test]
fn a_write_that_fails_in_the_middle_of_a_file() {
    // The limit on file sizes stands for a disk that fills up; without the signal it is an error of `write`.
    let place = Place::of("opt-pre-ln");
    let convert = ["convert", text(&place.source), text(&place.out), "--quiet"];
    let mut limited = command("trap '' XFSZ; ulimit -f 100;");
    limited.args(convert);
    finish(limited, b"").is_refusal("limited", &[text(&place.out), ".safetensors"]);
    is_unfinished(&place.out);

    // The rest is done by a rerun, with the result of an undisturbed conversion.
    wick(&convert, b"").is_success("rerun");
    let fresh = Place::of("opt-pre-ln");
    wick(
        &["convert", text(&fresh.source), text(&fresh.out), "--quiet"],
        b"",
    )
    .is_success("fresh");
    assert!(snapshot(&place.out) == snapshot(&fresh.out));
}

#[test]
fn read_only_folders() {
    let place = Place::of("opt-pre-ln");
    let convert = |out: &str| wick(&["convert", text(&place.source), out, "--quiet"], b"");
    for out in ["/proc/wick-out", "/dev/null/out"] {
        convert(out).is_refusal(out, &[out]);
    }
    let disk = place.root.path().join("disk");
    if let Some(_mount) = Mount::read_only(&disk) {
        let out = disk.join("out");
        convert(text(&out)).is_refusal("a folder on it", &[text(&out), "Read-only"]);
        convert(text(&disk)).is_refusal("the disk itself", &[text(&disk), "Read-only"]);
        assert!(snapshot(&disk).is_empty());
    }
}

#[test]
fn stdout_that_is_full() {
    let Ok(full) = fs::OpenOptions::new().write(true).open("/dev/full") else {
        eprintln!("skipped: this system has no /dev/full");
        return;
    };
    let folder = super::converted(&super::fixture("opt-pre-ln"));
    let mut scored = Command::new(env!("CARGO_BIN_EXE_wick"));
    scored
        .args(["score", text(folder.path()), "--ids", "1,2", "--json"])
        .stdout(full);
    let output = scored.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.lines().count() == 1 && stderr.contains("No space"),
        "{stderr}"
    );
}
