//! Zip archives with one thing broken each.

use std::io::{Cursor, Write};

use wick_checkpoint::read_torch;
use zip::write::SimpleFileOptions;
use zip::ZipWriter;

use crate::support::{archive, archive_of, assert_sound, Pickle};

fn pickle() -> Vec<u8> {
    Pickle::in_dict("w", |pickle| pickle.tensor("0", 6, 0, &[2, 3], &[3, 1]))
}

fn position_of(file: &[u8], signature: &[u8], nth: usize) -> usize {
    let found = |at: &usize| file[*at..].starts_with(signature);
    (0..file.len()).filter(found).nth(nth).unwrap()
}

/// The good archive with bytes of the `nth` directory entry changed.
fn with_directory(nth: usize, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut file = archive_of(&pickle());
    let start = position_of(&file, b"PK\x01\x02", nth) + at;
    file[start..start + bytes.len()].copy_from_slice(bytes);
    file
}

#[track_caller]
fn assert_refused(file: &[u8], says: &str) {
    let error = read_torch(file).unwrap_err().to_string();
    assert!(error.contains(says), "{error}\n  should say: {says}");
}

#[test]
fn a_good_archive_reads() {
    for order in [None, Some("little")] {
        let pickle = pickle();
        let mut entries: Vec<(&str, &[u8])> = vec![("data.pkl", &pickle)];
        entries.extend(order.map(|order| ("byteorder", order.as_bytes())));
        entries.push(("data/0", &[1; 24]));
        let file = archive(&entries);
        let tensors = read_torch(&file).unwrap();
        assert_sound(&tensors, file.len());
        let start = tensors[0].offset_bytes as usize;
        assert_eq!(file[start..start + 24], [1; 24]);
    }
}

#[test]
fn sizes_in_zip64_fields_count() {
    let options = SimpleFileOptions::default().large_file(true);
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in [("a/data.pkl", pickle()), ("a/data/0", vec![1; 24])] {
        writer.start_file(name, options).unwrap();
        writer.write_all(&content).unwrap();
    }
    let mut file = writer.finish().unwrap().into_inner();
    assert_eq!(read_torch(&file).unwrap()[0].len_bytes, 24);
    // Id 1 and length, then the sizes; the fourth one is that of the second directory entry.
    let size = position_of(&file, &[1, 0, 16, 0, 24], 1) + 4;
    file[size..size + 16].copy_from_slice(&[[0, 0, 0, 0, 0, 1, 0, 0]; 2].concat());
    assert_refused(
        &file,
        "zip entry `a/data/0` reaches 1099511627776 bytes from byte",
    );
}

#[test]
fn entries_are_where_and_as_they_must_be() {
    // Offsets in a directory entry: 8 flags, 10 method, 20 and 24 sizes, 42 local header.
    let overlapping = with_directory(1, 42, &0u32.to_le_bytes());
    for (file, says) in [
        (
            with_directory(1, 10, &[8, 0]),
            "zip entry `archive/data/0` is compressed (Deflated)",
        ),
        (
            with_directory(0, 10, &[8, 0]),
            "zip entry `archive/data.pkl` is compressed",
        ),
        (
            with_directory(1, 8, &[1, 0]),
            "zip entry `archive/data/0` is encrypted",
        ),
        (
            with_directory(1, 24, &[23]),
            "zip entry `archive/data/0` has 24 bytes, but 23 by its header",
        ),
        (
            with_directory(1, 20, &[0xf0, 0xff, 0xff, 0x7f]),
            "zip entry `archive/data/0` reaches 2147483632 bytes from byte",
        ),
        (
            with_directory(1, 20, &[25, 0, 0, 0, 25, 0, 0, 0]),
            "zip entry `archive/data/0` reaches 25 bytes from byte",
        ),
        (
            with_directory(1, 42, &u32::MAX.to_le_bytes()),
            "zip entry `archive/data/0` has no readable header",
        ),
        (
            with_directory(1, 42, &[0xff, 0xff, 0xff, 0x7f]),
            "zip entry `archive/data/0` has no readable header",
        ),
        (overlapping, "starts at byte 0, before `archive/data"),
    ] {
        assert_refused(&file, says);
    }
}

#[test]
fn names_are_what_pytorch_writes() {
    let pickle = pickle();
    for (entries, says) in [
        (
            vec![("data/0", &[0; 24][..])],
            "a zip archive that starts with [\"archive/data/0\"]",
        ),
        (
            vec![("data.pkl", &pickle[..])],
            "zip entry `archive/data/0` is missing",
        ),
        (
            vec![("data.pkl", &pickle), ("data/0", &[0; 23])],
            "tensor `w`: its storage `0` of 6 F32 (23 bytes in the file) does not fit its data",
        ),
        (
            vec![
                ("data.pkl", &pickle),
                ("data/0", &[0; 24]),
                ("byteorder", b"big"),
            ],
            "a PyTorch file whose byte order is `big`; expected `little`",
        ),
        (
            vec![("data.pkl", &pickle), ("constants.pkl", b"\x80\x02).")],
            "a TorchScript archive",
        ),
    ] {
        assert_refused(&archive(&entries), says);
    }
    // Two entries of one name: the second is renamed where both headers have it.
    let mut twice = archive(&[
        ("data.pkl", &pickle),
        ("data/0", &[0; 24]),
        ("data/1", &[1; 24]),
    ]);
    while let Some(at) = twice.windows(14).position(|name| name == b"archive/data/1") {
        twice[at + 13] = b'0';
    }
    assert_refused(&twice, "it names an entry twice");
    // One name in UTF-8, and in the encoding that zip archives had before.
    let mut twice = archive(&[("data.pkl", &pickle), ("data/é", b""), ("data/X", b"")]);
    while let Some(at) = twice.windows(6).position(|name| name == b"data/X") {
        twice[at + 5] = 0x82;
    }
    assert_refused(&twice, "it names an entry twice");
}

#[test]
fn a_directory_that_is_too_long_or_not_there_is_refused() {
    let good = archive_of(&pickle());
    assert_refused(&good[..good.len() - 1], "as in a file that was cut short");
    assert_refused(&[&b"PK\x03\x04"[..], &[0; 100]].concat(), "cut short");
    // Something before the archive would shift every offset.
    assert_refused(&[&b"PK\x03\x04"[..], &good].concat(), "cut short");
    let empty = archive(&[]);
    assert_refused(&[&b"PK\x03\x04"[..], &empty[4..]].concat(), "cut short");
    let comment = vec![b'c'; usize::from(u16::MAX)];
    let many = archive_with_comments(600, &comment);
    assert_refused(&many, "a directory of more than 33554432 bytes");
}

/// An archive with one entry, listed `count` times with a comment each.
fn archive_with_comments(count: u16, comment: &[u8]) -> Vec<u8> {
    let good = archive_of(&pickle());
    let directory = position_of(&good, b"PK\x01\x02", 0);
    let second = position_of(&good, b"PK\x01\x02", 1);
    let end = position_of(&good, b"PK\x05\x06", 0);
    let mut entry = good[directory..second].to_vec();
    entry[32..34].copy_from_slice(&(comment.len() as u16).to_le_bytes());
    entry.extend(comment);
    let mut file = good[..directory].to_vec();
    (0..count).for_each(|_| file.extend(&entry));
    let size = (file.len() - directory) as u32;
    let mut tail = good[end..].to_vec();
    tail[8..10].copy_from_slice(&count.to_le_bytes());
    tail[10..12].copy_from_slice(&count.to_le_bytes());
    tail[12..16].copy_from_slice(&size.to_le_bytes());
    file.extend(tail);
    file
}
