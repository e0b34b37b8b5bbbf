//! Which texts predictors are judged on, where they are made from several.

use std::fs;
use std::path::Path;

use crate::demo::demo;
use crate::predictors::{mean, number, short_text, train};
use crate::support::{json, text};

/// Two texts that could not be less alike: what is measured does not depend on which of them is the last.
#[test]
fn each_of_several_texts_is_measured_on() {
    let folder = demo();
    let (short, numbers) = (short_text(folder.path()), folder.path().join("numbers.txt"));
    fs::write(&numbers, "0 1 2 3 4 5 6 7 8 9\n".repeat(600)).unwrap();
    let out = folder.path().join("p.safetensors");
    let active = |texts: &[&Path]| {
        let more = ["--epochs", "0", "--out", text(&out)];
        let report = json(&train(folder.path(), texts, &more));
        mean(&report["layers"], |layer| {
            number(&layer["trained"][0], "active_fraction")
        })
    };
    let alone = [active(&[&short]), active(&[&numbers])];
    let both = [active(&[&short, &numbers]), active(&[&numbers, &short])];
    let apart = (alone[0] - alone[1]).abs();
    assert!(apart > 0.01, "{alone:?}");
    assert!(
        (both[0] - both[1]).abs() < 0.2 * apart,
        "{alone:?}, {both:?}"
    );
    for (one, other) in alone.iter().zip(both) {
        assert!((one - other).abs() > 0.1 * apart, "{alone:?}, {both:?}");
    }
}
