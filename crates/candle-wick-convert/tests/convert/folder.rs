//! The output folder: what it may hold before, and what happens when it cannot be written.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_wick_convert::{ConvertError, ConvertOptions};
use wick_format::Dtype;

use crate::tiny::{run, run_default, snapshot, Place, Tiny};

fn place() -> Place {
    Place::of(&Tiny::llama(16, 24, Dtype::F16))
}

#[test]
fn a_complete_folder_is_left_as_it_is() {
    let place = place();
    run_default(&place.source, &place.out).unwrap();
    let before = snapshot(&place.out);
    let modified = fs::metadata(place.out.join("wick.json"))
        .unwrap()
        .modified()
        .unwrap();
    let report = run_default(&place.source, &place.out).unwrap();
    assert!(
        report.notes[0].contains("nothing was written"),
        "{:?}",
        report.notes
    );
    assert_eq!(report.files.len(), 3);
    assert_eq!(snapshot(&place.out), before);
    assert_eq!(
        fs::metadata(place.out.join("wick.json"))
            .unwrap()
            .modified()
            .unwrap(),
        modified
    );
    // A kill between the manifest and the end leaves the state; that is complete too.
    fs::write(
        place.out.join(".wick-convert.json"),
        "{\"job\":\"\",\"finished\":[]}",
    )
    .unwrap();
    run_default(&place.source, &place.out).unwrap();
    assert_eq!(snapshot(&place.out), before);
    // Predictors made later are no reason to refuse.
    fs::write(place.out.join("predictors.safetensors"), "x").unwrap();
    run_default(&place.source, &place.out).unwrap();
}

#[test]
fn a_folder_of_something_else_is_refused() {
    let place = place();
    run_default(&place.source, &place.out).unwrap();
    let before = snapshot(&place.out);
    let expect = |error: ConvertError, part: &str| {
        assert!(error.to_string().contains(part), "{error}");
        assert_eq!(snapshot(&place.out), before);
    };
    let other = Place::of(&Tiny::llama(16, 32, Dtype::F16));
    expect(
        run_default(&other.source, &place.out).unwrap_err(),
        "another checkpoint",
    );
    let options = ConvertOptions {
        dtype: Some(Dtype::Bf16),
        ..Default::default()
    };
    expect(
        run(&place.source, &place.out, &options).unwrap_err(),
        "other options",
    );

    let record = place.out.join("ffn-00001-of-00001.safetensors");
    let bytes = fs::read(&record).unwrap();
    fs::write(&record, &bytes[..100]).unwrap();
    let error = run_default(&place.source, &place.out)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("damaged") && error.contains("ffn-00001"),
        "{error}"
    );
    assert!(error.contains("100 of"), "{error}");

    let mine = place.out.with_extension("mine");
    fs::create_dir(&mine).unwrap();
    fs::write(mine.join("thesis.txt"), "years").unwrap();
    let error = run_default(&place.source, &mine).unwrap_err().to_string();
    assert!(
        error.contains("thesis.txt") && error.contains("choose"),
        "{error}"
    );
    assert_eq!(snapshot(&mine).len(), 1);

    let error = run_default(&place.source, &mine.join("thesis.txt"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("not a folder"), "{error}");
}

#[test]
fn an_empty_folder_and_a_deep_one_are_fine() {
    let place = place();
    fs::create_dir(&place.out).unwrap();
    run_default(&place.source, &place.out).unwrap();
    let deep = place.out.with_extension("a").join("b").join("c");
    run_default(&place.source, &deep).unwrap();
    assert_eq!(snapshot(&place.out), snapshot(&deep));
}

#[test]
fn the_source_folder_is_no_output_folder() {
    let place = place();
    let before = snapshot(&place.source);
    for out in [
        place.source.clone(),
        place.source.join("out"),
        place.source.join("a/../b"),
    ] {
        let error = run_default(&place.source, &out).unwrap_err();
        assert!(matches!(&error, ConvertError::Output { .. }), "{error}");
        assert!(error.to_string().contains("source folder"), "{error}");
    }
    assert_eq!(snapshot(&place.source), before);
}

/// A folder in which nothing can be made, even by root.
fn read_only(place: &Place) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let folder = place.out.with_extension("readonly");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(folder.join("probe"), "").is_ok() {
        return PathBuf::from("/proc/self");
    }
    folder
}

#[test]
fn a_read_only_folder() {
    let place = place();
    let out = read_only(&place).join("out");
    let error = run_default(&place.source, &out).unwrap_err();
    assert!(
        matches!(
            &error,
            ConvertError::Io {
                action: "create",
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains(&out.display().to_string()),
        "{error}"
    );
}

/// A small file system, gone when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(at: &Path, size: &str) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let options = format!("size={size}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "wick-test"])
            .arg(at)
            .output()
            .is_ok_and(|output| output.status.success());
        if !mounted {
            eprintln!("skipped: no right to mount a small tmpfs");
        }
        mounted.then(|| Self(at.to_path_buf()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _left_mounted = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk() {
    let place = Place::of(&Tiny::llama(256, 2000, Dtype::F32)); // 12 MB of records
    let at = place.out.with_extension("disk");
    let Some(disk) = SmallDisk::new(&at, "8m") else {
        return;
    };
    let out = disk.0.join("out");
    let error = run_default(&place.source, &out).unwrap_err();
    assert!(
        matches!(
            error,
            ConvertError::DiskFull {
                free_bytes: Some(_),
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("no room on the disk"), "{error}");
    assert!(!out.join("wick.json").exists());
    let left = fs::read_dir(&out).map_or(0, |list| {
        list.filter(|entry| {
            let name = entry.as_ref().unwrap().file_name();
            name.to_string_lossy().ends_with(".safetensors")
        })
        .count()
    });
    assert_eq!(left, 0);
}

/// Nobody may ever write into a pipe.
#[test]
#[cfg(unix)]
fn pipes_are_not_waited_for_and_links_to_nothing_are_named() {
    for name in ["config.json", "model.safetensors"] {
        let place = place();
        let path = place.source.join(name);
        fs::remove_file(&path).unwrap();
        let made = Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let refused = run_default(&place.source, &place.out).unwrap_err();
        let sentence = refused.to_string();
        assert!(
            sentence.contains(name) && sentence.contains("no regular file"),
            "{sentence}"
        );
    }
    let place = place();
    let path = place.source.join("model.safetensors");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("nowhere", &path).unwrap();
    let refused = run_default(&place.source, &place.out).unwrap_err();
    let sentence = refused.to_string();
    assert!(
        sentence.contains("missing: model.safetensors"),
        "{sentence}"
    );
}
