//! Files of `torch.save` before version 1.6: five pickles, then the storages.

use std::collections::BTreeMap;

use super::heap::{Object, Storage, Value};
use super::machine::{self, Pickle};
use super::place::{place, Extent};
use super::state;
use crate::bytes::Bytes;
use crate::{CheckpointError, StoredTensor};

/// The number 0x1950a86a20f9469cfc6c, as pickles hold it.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

/// The only version there has been.
const PROTOCOL_VERSION: i64 = 1001;

/// Reads the tensors of such a file.
pub(super) fn read(file: &[u8]) -> Result<Vec<StoredTensor>, CheckpointError> {
    let mut bytes = Bytes::new(file);
    check_head(&mut bytes)?;
    let pickle = machine::run(&mut bytes)?;
    let tensors = state::tensors(&pickle)?;
    let keys = machine::run(&mut bytes)?;
    let extents = storages(&mut bytes, &pickle, &keys)?;
    let file_len = file.len() as u64;
    let placed = tensors.into_iter().map(|(name, view)| {
        let key = view.storage.key;
        let root = extents
            .get(key)
            .ok_or_else(|| fail(key, "is not in the file's list"))?;
        place(name, view, *root, file_len)
    });
    placed.collect()
}

/// The three pickles before the object.
fn check_head(bytes: &mut Bytes<'_>) -> Result<(), CheckpointError> {
    let magic = machine::run(bytes)?;
    if !matches!(magic.value, Value::LongInt(number) if number == MAGIC) {
        return Err(CheckpointError::Kind {
            found: format!("a pickle of {}", magic.heap.describe(magic.value)),
            expected: "a file that torch.save wrote, which starts with its magic number",
        });
    }
    let version = machine::run(bytes)?;
    if !matches!(version.value, Value::Int(PROTOCOL_VERSION)) {
        return Err(CheckpointError::Kind {
            found: format!(
                "a PyTorch file whose protocol version is {}",
                version.heap.describe(version.value)
            ),
            expected: "1001",
        });
    }
    let system = machine::run(bytes)?;
    let entries = system.heap.dict(system.value).unwrap_or_default();
    let little = |&(key, value): &_| {
        matches!(
            (key, value),
            (Value::Str("little_endian"), Value::Bool(true))
        )
    };
    if !entries.iter().any(little) {
        return Err(CheckpointError::Kind {
            found: "a PyTorch file that was written on a big-endian machine".into(),
            expected: "a little-endian one",
        });
    }
    Ok(())
}

/// Where each key's elements lie: in the list's order, behind it, each after its element count.
fn storages<'a>(
    bytes: &mut Bytes<'a>,
    pickle: &Pickle<'a>,
    keys: &Pickle<'a>,
) -> Result<BTreeMap<&'a str, Extent>, CheckpointError> {
    let declared = declared(pickle)?;
    let Some(Object::List(items)) = keys.heap.get(keys.value) else {
        return Err(CheckpointError::Kind {
            found: format!(
                "a PyTorch file with {} where storage keys should be",
                keys.heap.describe(keys.value)
            ),
            expected: "a list",
        });
    };
    let mut extents = BTreeMap::new();
    for &item in items {
        let Value::Str(key) = item else {
            return Err(fail("", format!("its key is {}", keys.heap.describe(item))));
        };
        let storage = declared
            .get(key)
            .ok_or_else(|| fail(key, "no tensor uses it, so that its dtype is not known"))?;
        let count = bytes.u64("a storage's element count")?;
        if count != storage.root_count {
            let expected = storage.root_count;
            return Err(fail(
                key,
                format!("{count} elements, but {expected} by the pickle"),
            ));
        }
        let len_bytes = count
            .checked_mul(storage.dtype.size_bytes)
            .ok_or_else(|| fail(key, format!("{count} elements do not fit 64 bits")))?;
        let extent = Extent {
            offset_bytes: bytes.position(),
            len_bytes,
        };
        bytes.take("a storage", len_bytes)?;
        if extents.insert(key, extent).is_some() {
            return Err(fail(key, "is listed twice"));
        }
    }
    Ok(extents)
}

/// The storages that the object names; those of a key agree with each other.
fn declared<'p, 'a>(
    pickle: &'p Pickle<'a>,
) -> Result<BTreeMap<&'a str, &'p Storage<'a>>, CheckpointError> {
    let mut declared: BTreeMap<&str, &Storage<'_>> = BTreeMap::new();
    for object in pickle.heap.objects() {
        let Object::Storage(storage) = object else {
            continue;
        };
        let first = *declared.entry(storage.key).or_insert(storage);
        if (first.dtype, first.root_count) != (storage.dtype, storage.root_count) {
            return Err(fail(
                storage.key,
                format!(
                    "{} {} here, {} {} there",
                    first.root_count, first.dtype.name, storage.root_count, storage.dtype.name
                ),
            ));
        }
    }
    Ok(declared)
}

fn fail(key: &str, problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Storage {
        key: key.into(),
        problem: problem.into(),
    }
}
