//! Files from before zip archives, with one thing broken each.

use wick_checkpoint::read_torch;

use crate::support::{assert_sound, legacy, legacy_head, Pickle};

fn object() -> Vec<u8> {
    Pickle::in_dict("w", |pickle| pickle.tensor("k", 6, 0, &[2, 3], &[3, 1]))
}

/// A storage `k` of six numbers, of which the last argument names a part.
fn part(offset: i64, count: i64) -> Vec<u8> {
    Pickle::in_dict("w", |pickle| {
        let pickle = pickle
            .global("torch._utils", "_rebuild_tensor_v2")
            .raw(b"((");
        let pickle = pickle
            .text("storage")
            .global("torch", "FloatStorage")
            .text("k");
        let pickle = pickle.text("cpu").int(6).raw(b"(").text("view");
        pickle
            .int(offset)
            .int(count)
            .raw(b"ttQ")
            .view(1, &[2], &[1])
    })
}

#[test]
fn good_files_read() {
    for (object, offset, len) in [(object(), 0, 24), (part(2, 3), 12, 8)] {
        let file = legacy(&object, &["k"], &[(6, &[0; 24])]);
        let tensors = read_torch(&file).unwrap();
        assert_sound(&tensors, file.len());
        let data = file.len() as u64 - 24;
        assert_eq!(tensors[0].offset_bytes, data + offset);
        assert_eq!(tensors[0].len_bytes, len);
    }
}

#[test]
fn broken_files_are_refused_in_a_sentence() {
    let with_head = |head: Vec<u8>| [head, object()].concat();
    let two_types = Pickle::new()
        .raw(b"}(")
        .text("w")
        .tensor("k", 6, 0, &[1], &[1])
        .text("v");
    let two_types = two_types.storage("HalfStorage", "k", 6).raw(b"u.").0;
    for (file, says) in [
        (
            with_head(legacy_head(1002, true)),
            "a PyTorch file whose protocol version is the number 1002; expected 1001",
        ),
        (
            with_head(legacy_head(1001, false)),
            "a PyTorch file that was written on a big-endian machine",
        ),
        (object(), "a pickle of a dictionary; expected a file that torch.save wrote"),
        (legacy(&object(), &[], &[]), "storage `k`: is not in the file's list"),
        (
            legacy(&object(), &["k", "k"], &[(6, &[0; 24]), (6, &[0; 24])]),
            "storage `k`: is listed twice",
        ),
        (
            legacy(&object(), &["k", "other"], &[(6, &[0; 24])]),
            "storage `other`: no tensor uses it",
        ),
        (
            legacy(&object(), &["k"], &[(5, &[0; 24])]),
            "storage `k`: 5 elements, but 6 by the pickle",
        ),
        (
            legacy(&object(), &["k"], &[(-1, &[0; 24])]),
            "storage `k`: 18446744073709551615 elements, but 6 by the pickle",
        ),
        (
            legacy(&object(), &["k"], &[(6, &[0; 23])]),
            "needs 24 bytes, 23 are left",
        ),
        (
            legacy(&two_types, &["k"], &[(6, &[0; 24])]),
            "storage `k`: 6 F32 here, 6 F16 there",
        ),
        (
            legacy(&part(4, 3), &["k"], &[(6, &[0; 24])]),
            "tensor `w`: its storage `k` of 6 F32 (24 bytes in the file) does not fit its data",
        ),
        (
            legacy(&part(0, 2), &["k"], &[(6, &[0; 24])]),
            "tensor `w`: shape [2], strides [1] and offset 1 reach beyond its storage of 2 elements",
        ),
        (legacy(&part(-1, 2), &["k"], &[(6, &[0; 24])]), "with -1"),
    ] {
        let error = read_torch(&file).unwrap_err().to_string();
        assert!(error.contains(says), "{error}\n  should say: {says}");
    }
}

#[test]
fn files_of_other_kinds_are_named() {
    let mut tar = vec![0; 512];
    tar[257..262].copy_from_slice(b"ustar");
    for (file, says) in [
        (&b""[..], "an empty file"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "a Git LFS pointer",
        ),
        (b"<html>", "a web page"),
        (b"GGUF\x03\0\0\0", "a GGUF file"),
        (&tar, "a tar archive, as PyTorch before 0.1.10 wrote"),
        (b"\x01\x02", "a file that starts with [01, 02]"),
        (
            b"\x80\x01K\x01.",
            "a file that starts with [80, 01, 4b, 01, 2e]",
        ),
    ] {
        let error = read_torch(file).unwrap_err().to_string();
        assert!(error.contains(says), "{error}\n  should say: {says}");
    }
}
