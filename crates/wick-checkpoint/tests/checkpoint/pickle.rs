//! Hand-written pickles: what is understood, what is refused, and what must cost nothing.

use std::time::{Duration, Instant};

use wick_checkpoint::{read_torch, CheckpointError, StoredTensor};

use crate::support::{archive_of, assert_sound, Pickle};

fn read(pickle: &[u8]) -> Result<Vec<StoredTensor>, CheckpointError> {
    let file = archive_of(pickle);
    let read = read_torch(&file);
    if let Ok(tensors) = &read {
        assert_sound(tensors, file.len());
    }
    read
}

#[track_caller]
fn assert_refused(pickle: &[u8], says: &str) {
    let error = read(pickle).unwrap_err().to_string();
    assert!(error.contains(says), "{error}\n  should say: {says}");
}

fn in_dict(value: impl FnOnce(Pickle) -> Pickle) -> Vec<u8> {
    Pickle::in_dict("w", value)
}

#[test]
fn functions_that_make_tensors() {
    let old = in_dict(|pickle| {
        let pickle = pickle.global("torch._utils", "_rebuild_tensor").raw(b"(");
        let pickle = pickle.storage("FloatStorage", "0", 6);
        pickle.int(0).ints(&[6]).ints(&[1]).raw(b"tR")
    });
    let of_dtype = |name: &str, count: i64| {
        in_dict(|pickle| {
            let pickle = pickle
                .global("torch._utils", "_rebuild_tensor_v3")
                .raw(b"(");
            let pickle = pickle.storage("UntypedStorage", "0", 24);
            let pickle = pickle.int(0).ints(&[count]).ints(&[1]).raw(b"\x89");
            let pickle = pickle.global("collections", "OrderedDict").raw(b")R");
            pickle.global("torch", name).raw(b"tR")
        })
    };
    let parameter = in_dict(|pickle| {
        let pickle = pickle
            .global("torch._utils", "_rebuild_parameter")
            .raw(b"(");
        pickle.tensor("0", 6, 0, &[6], &[1]).raw(b"\x88}tR")
    });
    let subclass = in_dict(|pickle| {
        let pickle = pickle
            .global("torch._tensor", "_rebuild_from_type_v2")
            .raw(b"(");
        let pickle = pickle.global("torch._utils", "_rebuild_tensor_v2");
        let pickle = pickle.global("some.module", "Subclass").raw(b"(");
        let pickle = pickle.storage("FloatStorage", "0", 6).int(0).ints(&[6]);
        pickle.ints(&[1]).raw(b"\x89Nt}tR")
    });
    let size = in_dict(|pickle| {
        let pickle = pickle
            .global("torch._utils", "_rebuild_tensor_v2")
            .raw(b"(");
        let pickle = pickle
            .storage("FloatStorage", "0", 6)
            .int(0)
            .global("torch", "Size");
        pickle
            .raw(b"(")
            .ints(&[6])
            .raw(b"tR")
            .ints(&[1])
            .raw(b"\x89NtR")
    });
    let python2 = Pickle::new()
        .global("collections", "OrderedDict")
        .raw(b"(](](U\x01w");
    let python2 = python2.tensor("0", 6, 0, &[6], &[1]).raw(b"eetR.").0;
    for (pickle, dtype, count) in [
        (old, "F32", 6),
        (of_dtype("float8_e4m3fn", 24), "F8_E4M3", 24),
        (of_dtype("uint16", 12), "U16", 12),
        (parameter, "F32", 6),
        (subclass, "F32", 6),
        (size, "F32", 6),
        (python2, "F32", 6),
    ] {
        let tensors = read(&pickle).unwrap();
        assert_eq!(tensors.len(), 1);
        assert_eq!((&tensors[0].name[..], &tensors[0].dtype[..]), ("w", dtype));
        assert_eq!(tensors[0].shape, [count]);
    }
}

#[test]
fn opcodes_of_later_protocols() {
    // A frame, short strings, memoized names by STACK_GLOBAL, tuples of three, sets, long strings.
    let pickle =
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x03set\x8f(K\x01K\x02\x90\
        \x8c\x03one(K\x01\x91\x8c\x05bytesC\x02\xff\xfe\x8c\x01f\x47\0\0\0\0\0\0\0\0";
    let long = b"\x8d\x01\0\0\0\0\0\0\0n\x8e\x01\0\0\0\0\0\0\0b\x8d\x01\0\0\0\0\0\0\0w";
    let head = b"\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2\x93\x94(";
    let pickle = Pickle(pickle.to_vec()).raw(long).raw(head);
    let pickle = pickle
        .storage("FloatStorage", "0", 6)
        .int(0)
        .raw(b"K\x01K\x02K\x03\x87\x94");
    let pickle = pickle.raw(b"K\x06K\x03K\x01\x87\x89NtRu0h\x00.").0;
    let tensors = read(&pickle).unwrap();
    assert_eq!((tensors.len(), &tensors[0].name[..]), (1, "w"));
    assert_eq!(tensors[0].shape, [1, 2, 3]);
}

/// A tensor `w`, and a value under `other`.
fn beside(value: &dyn Fn(Pickle) -> Pickle) -> Vec<u8> {
    let pickle = Pickle::new()
        .raw(b"}(")
        .text("w")
        .tensor("0", 6, 0, &[6], &[1]);
    value(pickle.text("other")).raw(b"u.").0
}

#[test]
fn what_is_no_tensor_is_skipped() {
    let skipped: [&dyn Fn(Pickle) -> Pickle; 7] = [
        &|pickle| pickle.raw(b"N"),
        &|pickle| pickle.raw(b"](K\x01e"),
        &|pickle| {
            pickle
                .global("argparse", "Namespace")
                .raw(b")\x81}(")
                .text("a")
                .raw(b"K\x01ub")
        },
        &|pickle| {
            pickle
                .global("numpy.core.multiarray", "scalar")
                .raw(b"(K\x01tR")
        },
        &|pickle| {
            pickle
                .global("torch", "device")
                .raw(b"(")
                .text("cpu")
                .raw(b"tR")
        },
        &|pickle| pickle.global("torch", "float16"),
        &|pickle| pickle.global("torch.optim.sgd", "SGD").raw(b")\x81}b"),
    ];
    for value in skipped {
        assert_eq!(read(&beside(value)).unwrap().len(), 1);
    }
}

#[test]
fn what_may_be_a_tensor_is_refused_by_the_name_of_its_maker() {
    let call = |module: &'static str, name: &'static str| {
        beside(&move |pickle| pickle.global(module, name).raw(b"(K\x01tR"))
    };
    for (pickle, says) in [
        (
            call("os", "system"),
            "the entry `other` is made by `os.system`",
        ),
        (
            call("builtins", "eval"),
            "the entry `other` is made by `builtins.eval`",
        ),
        (
            call("torch._utils", "_rebuild_qtensor"),
            "is made by `torch._utils._rebuild_qtensor`",
        ),
        (
            call("torch", "FloatStorage"),
            "is made by `torch.FloatStorage`",
        ),
        (
            beside(&|pickle| pickle.global("torch.nn", "Parameter").raw(b")\x81")),
            "is made by `torch.nn.Parameter`",
        ),
        (
            beside(&|pickle| {
                let pickle = pickle.global("builtins", "getattr").raw(b"(K\x01tR");
                pickle.raw(b"(K\x01tR")
            }),
            "is made by `builtins.getattr`",
        ),
        (
            beside(&|pickle| {
                let pickle = pickle
                    .global("torch._utils", "_rebuild_tensor_v2")
                    .raw(b"(");
                pickle.storage("QInt8Storage", "0", 24).view(0, &[1], &[1])
            }),
            "is made by `torch.QInt8Storage`",
        ),
    ] {
        assert_refused(&pickle, says);
    }
}

#[test]
fn the_last_of_equal_names_counts_as_in_python() {
    let pickle = Pickle::new()
        .raw(b"}(")
        .text("w")
        .tensor("0", 6, 0, &[6], &[1]);
    let pickle = pickle.text("w").tensor("0", 6, 1, &[2], &[1]).raw(b"u.").0;
    let tensors = read(&pickle).unwrap();
    assert_eq!((tensors.len(), &tensors[0].shape[..]), (1, &[2][..]));
}

#[test]
fn files_without_tensors_say_what_they_hold() {
    let holds = |found: &str| format!("no tensors: the file holds {found}");
    for (pickle, says) in [
        (Pickle::new().raw(b"N."), holds("None")),
        (Pickle::new().raw(b"]."), holds("a list")),
        (Pickle::new().raw(b"K\x05."), holds("the number 5")),
        (
            Pickle::new().raw(b"}."),
            holds("a dictionary with 0 names []"),
        ),
        (
            Pickle::new().raw(b"}").text("model").raw(b"}s."),
            holds("a dictionary with 1 names [\"model\"]"),
        ),
        (
            Pickle::new().global("my.models", "Net").raw(b")\x81}b."),
            "no tensors: the file holds an object of `my.models.Net`".into(),
        ),
        (
            Pickle::new().global("transformers", "load").raw(b")R."),
            "the whole file is made by `transformers.load`".into(),
        ),
    ] {
        assert_refused(&pickle.0, &says);
    }
}

#[test]
fn views_reach_no_further_than_their_storage() {
    let max = i64::MAX;
    let reach = "reach beyond its storage of 6 elements";
    for (count, offset, shape, strides, says) in [
        (6, 1, &[2, 3][..], &[3, 1][..], reach),
        (6, 0, &[2, 3], &[4, 1], reach),
        (6, 7, &[0], &[1], reach),
        (6, max, &[1], &[1], reach),
        (6, 0, &[max, max], &[max, max], reach),
        (6, 0, &[2, 2], &[max, max], reach),
        (
            6,
            0,
            &[max, max],
            &[0, 0],
            "has more elements than the file has bytes",
        ),
        (
            6,
            0,
            &[1 << 20],
            &[0],
            "has more elements than the file has bytes",
        ),
        (
            7,
            0,
            &[1],
            &[1],
            "its storage `0` of 7 F32 (24 bytes in the file) does not fit",
        ),
        (max, 0, &[1], &[1], "does not fit its data"),
        (-1, 0, &[1], &[1], "with -1"),
        (
            6,
            -1,
            &[1],
            &[1],
            "a call of `torch._utils._rebuild_tensor_v2` with -1",
        ),
        (6, 0, &[-1], &[1], "with -1"),
        (6, 0, &[1], &[-1], "with -1"),
        (6, 0, &[1, 1], &[1], "with 2 dimensions and 1 strides"),
        (6, 0, &[1; 9], &[1; 9], "with 9 dimensions, more than 8"),
    ] {
        let pickle = in_dict(|pickle| pickle.tensor("0", count, offset, shape, strides));
        assert_refused(&pickle, says);
    }
    for (offset, shape, strides) in [(6, &[0][..], &[1][..]), (0, &[max, 0], &[max, max])] {
        let pickle = in_dict(|pickle| pickle.tensor("0", 6, offset, shape, strides));
        assert_eq!(read(&pickle).unwrap()[0].len_bytes, 0);
    }
}

#[test]
fn programs_that_make_no_sense_are_refused_where_they_do() {
    for (pickle, says) in [
        (
            &b"\x80\x06N."[..],
            "pickle, byte 46: protocol 6, expected 2 to 5",
        ),
        (b"\x80\x02I1\n.", "opcode 0x49 is not one that weights need"),
        (b"\x80\x02\x82\x01.", "opcode 0x82"),
        (b"\x80\x02.", "needs a value where the stack has none"),
        (b"\x80\x02K\x01(.", "needs a value where the stack has none"),
        (b"\x80\x02t.", "needs a mark where there is none"),
        (
            b"\x80\x02(K\x01K\x02\x87.",
            "needs 3 values, the stack has 2",
        ),
        (b"\x80\x02h\x05.", "nothing under memo index 5"),
        (b"\x80\x02(K\x01d.", "a key without a value"),
        (b"\x80\x02K\x01K\x02a.", "adds items to the number 1"),
        (b"\x80\x02]K\x01K\x02s.", "adds items to a list"),
        (
            b"\x80\x02K\x01}b.",
            "sets the state of the number 1 to a dictionary",
        ),
        (b"\x80\x02K\x01)R.", "a call of the number 1"),
        (
            b"\x80\x02K\x01K\x02\x93.",
            "a name that is not made of strings",
        ),
        (b"\x80\x02K\x01Q.", "a persistent id of an unknown kind"),
        (b"\x80\x02cmodule cut short", "cut short: a name at byte"),
        (
            &[b"\x80\x02c", &[b'm'; 1024][..]].concat(),
            "a name without an end",
        ),
        (b"\x80\x02X\xff\xff\xff\xff.", "cut short: a string at byte"),
        (
            b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
            "cut short: a string at byte",
        ),
        (b"\x80\x02K\x01", "cut short: the next opcode of the pickle"),
    ] {
        assert_refused(pickle, says);
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let rebuild = |args: &[u8]| {
        Pickle::new()
            .global("torch._utils", "_rebuild_tensor_v2")
            .raw(args)
            .raw(b"R.")
            .0
    };
    let nested = Pickle::new()
        .global("torch._tensor", "_rebuild_from_type_v2")
        .raw(b"(");
    let nested = nested
        .global("torch._tensor", "_rebuild_from_type_v2")
        .raw(b"N)NtR.")
        .0;
    for (pickle, says) in [
        (
            &rebuild(b")")[..],
            "a call of `torch._utils._rebuild_tensor_v2` with 0 arguments",
        ),
        (
            &rebuild(b"(NK\x01))t"),
            "a call of `torch._utils._rebuild_tensor_v2` on None",
        ),
        (
            &nested,
            "a call of `torch._tensor._rebuild_from_type_v2` without a function",
        ),
    ] {
        assert_refused(pickle, says);
    }
    let state = in_dict(|pickle| pickle.tensor("0", 6, 0, &[6], &[1]).raw(b"K\x01\x85b"));
    assert_refused(&state, "sets the state of a single tensor to a tuple");
}

/// Runs in the time and memory of its opcodes, or is refused within them.
#[track_caller]
fn assert_cheap(pickle: &[u8], says: &str) {
    let start = Instant::now();
    assert_refused(pickle, says);
    assert!(start.elapsed() < Duration::from_secs(20), "{says}");
}

#[test]
fn small_pickles_that_would_grow_cost_nothing() {
    // Each round makes a list of twice the list before: 2^60 values if anything were copied.
    let mut laughs = Pickle::new().raw(b"]q\x00");
    for round in 0u8..60 {
        laughs = laughs.raw(&[b']', b'q', round + 1, b'(', b'h', round, b'h', round, b'e']);
    }
    assert_cheap(&laughs.raw(b".").0, "the file holds a list");
    // A list that holds itself, and a million lists in each other.
    assert_cheap(b"\x80\x02]q\x00h\x00a.", "the file holds a list");
    let mut deep = Pickle::new().raw(&vec![b']'; 1 << 19]);
    deep = deep.raw(&vec![b'a'; (1 << 19) - 1]).raw(b".");
    assert_cheap(&deep.0, "the file holds a list");
    // One long list of pairs, asked for as a dictionary again and again.
    let mut pairs = Pickle::new().raw(b"](");
    for _ in 0..100_000 {
        pairs = pairs.raw(b"K\x01K\x02\x86");
    }
    pairs = pairs.raw(b"eq\x000");
    for _ in 0..100_000 {
        pairs = pairs.raw(b"ccollections\nOrderedDict\nh\x00\x85R0");
    }
    assert_cheap(&pairs.raw(b"N.").0, "the file holds None");
}

#[test]
fn limits_hold() {
    let stack = Pickle::new().raw(&vec![b'N'; (1 << 20) + 1]).0;
    assert_cheap(&stack, "more than 1048576 values on the stack");
    let marks = Pickle::new().raw(&vec![b'('; (1 << 20) + 1]).0;
    assert_cheap(&marks, "more than 1048576 marks");
    let opcodes = Pickle::new().raw(&b"N0".repeat(1 << 21)).0;
    assert_cheap(&opcodes, "more than 4194304 opcodes");
    // The largest indices of the memo take no more room than the smallest.
    let memo = Pickle::new()
        .raw(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.")
        .0;
    assert_cheap(&memo, "the file holds None");
}
