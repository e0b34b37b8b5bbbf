//! Conversions that are killed: whatever was left, a rerun gives the bytes of an undisturbed one.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;

use candle_wick_convert::{convert, ConvertOptions, ConvertProgress};
use wick_format::{Dtype, Layout};

use crate::tiny::{run, snapshot, Place, Tiny};

/// A file for every layer, with records of every kind.
fn options() -> ConvertOptions {
    ConvertOptions {
        max_file_bytes: 1,
        layout: Layout::Both,
        ..Default::default()
    }
}

fn place() -> Place {
    let place = Place::new();
    Tiny::llama(64, 176, Dtype::F16).write_sharded(&place.source, 2);
    fs::write(place.source.join("tokenizer.json"), "{}").unwrap();
    place
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for (name, bytes) in snapshot(from) {
        fs::write(to.join(name), bytes).unwrap();
    }
}

#[test]
fn a_kill_at_any_moment() {
    let place = place();
    let cuts = tempfile::tempdir().unwrap();
    let count = RefCell::new(0);
    let steps = RefCell::new(BTreeSet::new());
    // What a kill would leave, at every report of progress: also in the middle of files.
    let watch = |progress: ConvertProgress<'_>| {
        steps.borrow_mut().insert(progress.step.to_string());
        if place.out.exists() {
            copy_folder(&place.out, &cuts.path().join(count.borrow().to_string()));
            *count.borrow_mut() += 1;
        }
    };
    convert(&place.source, &place.out, &options(), &watch).unwrap();
    let expected = snapshot(&place.out);
    assert!(expected.contains_key("wick.json"));
    for file in [
        "tokenizer.json",
        "resident.safetensors",
        "ffn-00002-of-00002.safetensors",
    ] {
        assert!(steps.borrow().contains(file), "{:?}", steps.borrow());
    }
    let count = *count.borrow();
    assert!(count > 20, "{count} cuts");
    for cut in 0..count {
        let cut = cuts.path().join(cut.to_string());
        assert!(!cut.join("wick.json").exists(), "the manifest comes last");
        run(&place.source, &cut, &options()).unwrap();
        assert_eq!(snapshot(&cut), expected, "{}", cut.display());
    }
}

#[test]
fn a_failure_in_every_file() {
    let place = place();
    run(&place.source, &place.out, &options()).unwrap();
    let expected = snapshot(&place.out);
    for file in expected.keys().filter(|name| *name != "wick.json") {
        let out = place.out.with_extension(file);
        let fail = |progress: ConvertProgress<'_>| {
            let written =
                !progress.step.starts_with("model-") && out.join(".wick-convert.json").exists();
            assert!(!written || progress.step != file, "failure asked for");
        };
        let failed = catch_unwind(AssertUnwindSafe(|| {
            convert(&place.source, &out, &options(), &fail)
        }));
        assert!(failed.is_err(), "{file} was never at work");
        let left = snapshot(&out);
        assert!(
            !left.contains_key(file) && !left.contains_key("wick.json"),
            "{file}"
        );
        assert!(
            !left.keys().any(|name| name.ends_with(".partial")),
            "{:?}",
            left.keys()
        );
        run(&place.source, &out, &options()).unwrap();
        assert_eq!(snapshot(&out), expected);
    }
}

#[test]
fn finished_files_are_kept_and_damaged_ones_are_not() {
    let place = place();
    let resident = place.out.join("resident.safetensors");
    let stop = |progress: ConvertProgress<'_>| {
        assert!(!progress.step.starts_with("ffn-00002"), "failure asked for");
    };
    let failed = catch_unwind(AssertUnwindSafe(|| {
        convert(&place.source, &place.out, &options(), &stop)
    }));
    assert!(failed.is_err());
    let before = fs::metadata(&resident).unwrap().modified().unwrap();
    let record = place.out.join("ffn-00001-of-00002.safetensors");
    let mut damaged = fs::read(&record).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    fs::write(&record, damaged).unwrap();
    run(&place.source, &place.out, &options()).unwrap();
    assert_eq!(
        fs::metadata(&resident).unwrap().modified().unwrap(),
        before,
        "written again"
    );
    let fresh = place.out.with_extension("fresh");
    run(&place.source, &fresh, &options()).unwrap();
    assert_eq!(snapshot(&place.out), snapshot(&fresh));
}

#[test]
fn unfinished_work_of_another_job_is_left_alone() {
    let place = place();
    let stop = |progress: ConvertProgress<'_>| {
        assert!(!progress.step.starts_with("ffn-"), "failure asked for");
    };
    let failed = catch_unwind(AssertUnwindSafe(|| {
        convert(&place.source, &place.out, &options(), &stop)
    }));
    assert!(failed.is_err());
    let left = snapshot(&place.out);
    let other = ConvertOptions {
        dtype: Some(Dtype::F32),
        ..options()
    };
    let error = run(&place.source, &place.out, &other)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("unfinished conversion of another"),
        "{error}"
    );
    assert_eq!(snapshot(&place.out), left);
    fs::write(place.out.join("notes.txt"), "mine").unwrap();
    let error = run(&place.source, &place.out, &options())
        .unwrap_err()
        .to_string();
    assert!(error.contains("already holds `notes.txt`"), "{error}");
}

#[test]
fn progress_ends_at_its_total() {
    let place = place();
    let last = RefCell::new((0, 0));
    let watch = |progress: ConvertProgress<'_>| {
        assert!(progress.done_bytes >= last.borrow().0);
        assert!(last.borrow().1 == 0 || last.borrow().1 == progress.total_bytes);
        *last.borrow_mut() = (progress.done_bytes, progress.total_bytes);
    };
    convert(&place.source, &place.out, &options(), &watch).unwrap();
    let (done, total) = *last.borrow();
    assert_eq!(done, total);
}

#[test]
fn place_and_date_do_not_matter() {
    let (first, second) = (place(), place());
    run(&first.source, &first.out, &options()).unwrap();
    run(
        &second.source,
        &second.out.with_extension("elsewhere"),
        &options(),
    )
    .unwrap();
    assert_eq!(
        snapshot(&first.out),
        snapshot(&second.out.with_extension("elsewhere"))
    );
}
