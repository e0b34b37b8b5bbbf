//! No bytes make a reader panic, and whatever it reads lies in the file.

use proptest::prelude::*;
use proptest::sample::Index;
use wick_checkpoint::{read_gguf, read_torch};

use crate::real;
use crate::support::{assert_sound, gguf_array, gguf_string, Gguf, Pickle};

/// One change to a file.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Cut(Index),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    /// A number of 1, 2, 4 or 8 bytes, which may be a length or a count.
    Number(Index, u64, usize),
    /// Bytes from one place at another one.
    Copy(Index, Index, usize),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let numbers = prop_oneof![
        any::<u64>(),
        0u64..300,
        (0u32..64).prop_map(|bits| 1 << bits),
        (0u32..64).prop_map(|bits| u64::MAX >> bits),
    ];
    let change = prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Change::Flip(at, byte)),
        1 => any::<Index>().prop_map(Change::Cut),
        1 => (any::<Index>(), prop::collection::vec(any::<u8>(), 1..20))
            .prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        1 => (any::<Index>(), 1usize..40).prop_map(|(at, len)| Change::Remove(at, len)),
        4 => (any::<Index>(), numbers, 0usize..4)
            .prop_map(|(at, number, power)| Change::Number(at, number, 1 << power)),
        2 => (any::<Index>(), any::<Index>(), 1usize..60)
            .prop_map(|(from, to, len)| Change::Copy(from, to, len)),
    ];
    prop::collection::vec(change, 1..5)
}

fn apply(file: &mut Vec<u8>, changes: &[Change]) {
    for change in changes {
        if file.is_empty() {
            return;
        }
        let len = file.len();
        match change {
            Change::Flip(at, byte) => file[at.index(len)] ^= byte,
            Change::Cut(at) => file.truncate(at.index(len)),
            Change::Insert(at, bytes) => {
                let at = at.index(len);
                file.splice(at..at, bytes.iter().copied());
            }
            Change::Remove(at, count) => {
                let at = at.index(len);
                file.drain(at..(at + count).min(len));
            }
            Change::Number(at, number, size) => {
                let at = at.index(len);
                let size = (*size).min(len - at);
                file[at..at + size].copy_from_slice(&number.to_le_bytes()[..size]);
            }
            Change::Copy(from, to, count) => {
                let (from, to) = (from.index(len), to.index(len));
                let count = (*count).min(len - from).min(len - to);
                file.copy_within(from..from + count, to);
            }
        }
    }
}

/// Bytes that often are opcodes, names and numbers that a pickle has.
fn pickle_like() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => prop::sample::select(b"(.01)}]NRQQbtudeas\x81\x85\x86\x87\x88\x89\x94\x93\x8f\x90\x91".to_vec())
            .prop_map(|opcode| vec![opcode]),
        2 => (0u8..6).prop_map(|index| vec![b'h', index]),
        1 => (0u8..6).prop_map(|index| vec![b'q', index]),
        2 => (-2i64..30).prop_map(|number| Pickle(Vec::new()).int(number).0),
        1 => Just(Pickle(Vec::new()).text("w").0),
        1 => Just(Pickle(Vec::new()).ints(&[2, 3]).0),
        1 => Just(Pickle(Vec::new()).storage("HalfStorage", "0", 12).0),
        1 => Just(Pickle(Vec::new()).tensor("0", 6, 0, &[2, 3], &[3, 1]).0),
        1 => Just(Pickle(Vec::new()).global("torch._utils", "_rebuild_tensor_v2").0),
        1 => Just(Pickle(Vec::new()).global("torch._tensor", "_rebuild_from_type_v2").0),
        1 => Just(Pickle(Vec::new()).global("collections", "OrderedDict").0),
        1 => Just(Pickle(Vec::new()).global("os", "system").0),
    ];
    prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
}

fn good_gguf() -> Vec<u8> {
    Gguf::new()
        .with("general.alignment", 4, &32u32.to_le_bytes())
        .with(
            "tokens",
            9,
            &gguf_array(8, 2, &["a", "b"].map(gguf_string).concat()),
        )
        .with("scores", 9, &gguf_array(6, 2, &[0; 8]))
        .with("name", 8, &gguf_string("llama"))
        .tensor("a", &[32, 2], 2, 0)
        .tensor("b", &[4, 2], 0, 64)
        .tensor("c", &[256], 12, 96)
        .data(240)
        .bytes()
}

fn check_torch(file: &[u8]) {
    if let Ok(tensors) = read_torch(file) {
        assert_sound(&tensors, file.len());
    }
}

fn check_gguf(file: &[u8]) {
    if let Ok(read) = read_gguf(file) {
        assert_sound(&read.tensors, file.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        check_torch(&bytes);
        check_torch(&[&b"PK\x03\x04"[..], &bytes].concat());
        check_torch(&[&b"\x80\x02"[..], &bytes].concat());
        check_gguf(&bytes);
        check_gguf(&[&b"GGUF\x03\0\0\0"[..], &bytes].concat());
    }

    #[test]
    fn changed_torch_files(which in any::<Index>(), changes in changes()) {
        let names: Vec<String> = real::expected().into_keys().collect();
        let mut file = real::file(&names[which.index(names.len())]);
        apply(&mut file, &changes);
        check_torch(&file);
    }

    #[test]
    fn changed_gguf_files(changes in changes()) {
        let mut file = good_gguf();
        apply(&mut file, &changes);
        check_gguf(&file);
    }

    #[test]
    fn pickles_of_likely_pieces(pieces in pickle_like()) {
        let head = Pickle::new().raw(b"}").text("w").0;
        let pickle = [&head, &pieces[..], b"s."].concat();
        check_torch(&crate::support::archive_of(&pickle));
    }
}

#[test]
fn the_files_that_are_changed_are_good() {
    assert_eq!(read_gguf(&good_gguf()).unwrap().tensors.len(), 3);
}
