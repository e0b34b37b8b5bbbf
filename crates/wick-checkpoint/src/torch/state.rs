//! The dictionary of tensors in a pickle: at the top, or one level down beside other things.

use std::collections::BTreeMap;

use super::heap::{Object, Value, View};
use super::machine::Pickle;
use crate::CheckpointError;

/// Where training programs put the weights when they also save an optimizer.
const NESTED: [&str; 3] = ["state_dict", "model", "module"];

/// Keys that an error lists.
const KEYS_SHOWN: usize = 8;

/// The tensors by name.
///
/// # Errors
/// The pickle holds no dictionary of tensors, or one of its entries may be a tensor that only an
/// unknown function could make.
pub(super) fn tensors<'p, 'a>(
    pickle: &'p Pickle<'a>,
) -> Result<BTreeMap<&'a str, &'p View<'a>>, CheckpointError> {
    let heap = &pickle.heap;
    if heap.dict(pickle.value).is_none() {
        refuse_opaque(pickle, pickle.value, || "the whole file".into())?;
        let found = heap.describe(pickle.value);
        return Err(CheckpointError::NoTensors { found });
    }
    let top = entries(pickle, pickle.value);
    let found = tensors_among(pickle, &top)?;
    if !found.is_empty() {
        return Ok(found);
    }
    let nested = NESTED.iter().filter_map(|&key| Some((key, *top.get(key)?)));
    for (key, value) in nested {
        refuse_opaque(pickle, value, || format!("the entry `{key}`"))?;
        let found = tensors_among(pickle, &entries(pickle, value))?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    for (name, &value) in &top {
        refuse_opaque(pickle, value, || format!("the entry `{name}`"))?;
    }
    let keys: Vec<&str> = top.keys().copied().take(KEYS_SHOWN).collect();
    Err(CheckpointError::NoTensors {
        found: format!("a dictionary with {} names {keys:?}", top.len()),
    })
}

/// The entries under names; as in Python, the last one of a name counts.
fn entries<'a>(pickle: &Pickle<'a>, value: Value<'a>) -> BTreeMap<&'a str, Value<'a>> {
    let pairs = pickle.heap.dict(value).unwrap_or_default();
    let named = pairs.iter().filter_map(|&(key, value)| match key {
        Value::Str(name) => Some((name, value)),
        _ => None,
    });
    named.collect()
}

/// The tensors among entries, of which the others are skipped unless they may be tensors too.
fn tensors_among<'p, 'a>(
    pickle: &'p Pickle<'a>,
    entries: &BTreeMap<&'a str, Value<'a>>,
) -> Result<BTreeMap<&'a str, &'p View<'a>>, CheckpointError> {
    let tensor = |(&name, &value)| match pickle.heap.get(value) {
        Some(Object::Tensor(view)) => Some((name, &**view)),
        _ => None,
    };
    let found: BTreeMap<&'a str, &'p View<'a>> = entries.iter().filter_map(tensor).collect();
    if !found.is_empty() {
        for (name, &value) in entries {
            refuse_opaque(pickle, value, || format!("the entry `{name}`"))?;
        }
    }
    Ok(found)
}

fn refuse_opaque<'a>(
    pickle: &Pickle<'a>,
    value: Value<'a>,
    what: impl FnOnce() -> String,
) -> Result<(), CheckpointError> {
    match value {
        Value::Opaque(opaque) if pickle.heap.may_be_tensor(opaque) => {
            Err(CheckpointError::UnknownGlobal {
                what: what(),
                global: pickle.heap.name_of(opaque.global),
            })
        }
        _ => Ok(()),
    }
}
