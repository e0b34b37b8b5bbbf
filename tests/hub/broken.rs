//! Downloads that end too early, and what they leave in the cache: the next one goes on, or starts again.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::server::Behaviour;
use super::{said, serve, starts, Place, WEIGHTS};
use crate::support::fixture;

#[test]
fn a_broken_download_goes_on() {
    let server = serve("opt-pre-ln", &[], &[]);
    let place = Place::new();
    server.behave(Behaviour {
        cut_bytes: Some(200_000),
        ..Behaviour::default()
    });
    let parts = [WEIGHTS, "after 200000 bytes", "run the same command again"];
    place.convert(&server, &[]).is_refusal(&parts);
    assert!(!place.out().exists() && !place.cached("refs/main").exists());
    server.behave(Behaviour::default());
    server.asked();
    place.convert(&server, &[]).is_success();
    assert_eq!(starts(&server.asked(), WEIGHTS), [200_000]);
    place.is_conversion_of(&fixture("opt-pre-ln"));
}

#[test]
fn a_download_that_stalls_is_given_up_and_goes_on() {
    let server = serve("opt-pre-ln", &[], &[]);
    let place = Place::new();
    server.behave(Behaviour {
        cut_bytes: Some(100_000),
        is_silent: true,
        ..Behaviour::default()
    });
    let mut command = place.command(&server.endpoint(), &[]);
    let stalled = said(command.env("HF_HUB_DOWNLOAD_TIMEOUT", "1"));
    stalled.is_refusal(&["sent nothing for 1 s", "it goes on where this one stopped"]);
    server.behave(Behaviour::default());
    server.asked();
    place.convert(&server, &[]).is_success();
    assert_eq!(starts(&server.asked(), WEIGHTS), [100_000]);
    place.is_conversion_of(&fixture("opt-pre-ln"));
}

#[test]
fn a_file_that_another_process_downloads() {
    let server = serve("opt-pre-ln", &[], &[]);
    let place = Place::new();
    fs::create_dir_all(place.cached("blobs")).unwrap();
    let path = place.cached(&format!("blobs/{}.lock", server.etag(WEIGHTS)));
    let lock = fs::File::create(&path).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let parts = [
        "another process",
        path.to_str().unwrap(),
        "wait until it is done",
    ];
    place.convert(&server, &[]).is_refusal(&parts);
    drop(lock);
    place.convert(&server, &[]).is_success();
}

#[test]
fn a_killed_download_goes_on() {
    let server = serve("opt-pre-ln", &[], &[]);
    let place = Place::new();
    server.behave(Behaviour {
        is_slow: true,
        ..Behaviour::default()
    });
    let mut child = place
        .command(&server.endpoint(), &[])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let part = place.cached(&format!("blobs/{}.part", server.etag(WEIGHTS)));
    let started = Instant::now();
    while fs::metadata(&part).map_or(0, |part| part.len()) < 50_000 {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "the download did not start"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());
    let had_bytes = fs::metadata(&part).unwrap().len() as usize;
    server.behave(Behaviour::default());
    server.asked();
    place.convert(&server, &[]).is_success();
    assert_eq!(starts(&server.asked(), WEIGHTS), [had_bytes]);
    place.is_conversion_of(&fixture("opt-pre-ln"));
}

#[test]
fn parts_and_blobs_that_are_no_good() {
    let server = serve("opt-pre-ln", &[], &[]);
    let weights = fs::read(fixture("opt-pre-ln").join(WEIGHTS)).unwrap();
    let len = weights.len();
    let whole_server = Behaviour {
        forgets_parts: true,
        ..Behaviour::default()
    };
    let cases: [(&str, Vec<u8>, Behaviour, &[usize]); 4] = [
        (
            "longer than the file",
            vec![7; len + 1],
            Behaviour::default(),
            &[0],
        ),
        (
            "complete, not renamed",
            weights.clone(),
            Behaviour::default(),
            &[len - 1],
        ),
        ("nothing", Vec::new(), whole_server.clone(), &[0]),
        (
            "sent again from the start",
            weights[..9999].to_vec(),
            whole_server,
            &[9999, 0],
        ),
    ];
    for (case, part, behaviour, expected) in cases {
        let place = Place::new();
        fs::create_dir_all(place.cached("blobs")).unwrap();
        let path = place.cached(&format!("blobs/{}.part", server.etag(WEIGHTS)));
        fs::write(path, part).unwrap();
        server.behave(behaviour);
        server.asked();
        place.convert(&server, &[]).is_success();
        assert_eq!(starts(&server.asked(), WEIGHTS), expected, "{case}");
        place.is_conversion_of(&fixture("opt-pre-ln"));
    }
    // A blob of another length, and a link to nothing.
    let place = Place::new();
    server.behave(Behaviour::default());
    place.convert(&server, &[]).is_success();
    let blob = place.cached(&format!("blobs/{}", server.etag(WEIGHTS)));
    for spoil in [
        |blob: &Path| fs::write(blob, "cut"),
        |blob: &Path| fs::remove_file(blob),
    ] {
        spoil(&blob).unwrap();
        place.convert(&server, &[]).is_success();
        assert!(fs::read(&blob).unwrap() == weights);
    }
}

#[test]
fn a_full_disk() {
    let server = serve("opt-pre-ln", &[], &[]);
    let place = Place::new();
    let mut mount = Command::new("mount");
    mount
        .args(["-t", "tmpfs", "-o", "size=300k", "tmpfs"])
        .arg(place.home());
    if !mount.output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: nothing can be mounted here (needs root)");
        return;
    }
    let said = place.convert(&server, &[]);
    let unmounted = Command::new("umount").arg(place.home()).status().unwrap();
    assert!(unmounted.success());
    let cache = place.home().join("hub");
    said.is_refusal(&["no room", WEIGHTS, cache.to_str().unwrap(), "HF_HOME"]);
}

#[test]
fn a_cache_that_cannot_be_written() {
    let server = serve("opt-pre-ln", &[], &[]);
    let place = Place::new();
    let file = place.root.path().join("file");
    fs::write(&file, "x").unwrap();
    let mut command = place.command(&server.endpoint(), &[]);
    said(command.env("HF_HOME", &file)).is_refusal(&[file.to_str().unwrap(), "HF_HOME"]);
    assert_eq!(fs::read(&file).unwrap(), b"x");
}
