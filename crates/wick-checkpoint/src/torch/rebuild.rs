//! Calls in a pickle: the few functions that make tensors, done here; all others, not done.
//!
//! Not here: where the elements lie in the file (`place`).

use super::globals::{Dtype, Meaning};
use super::heap::{Global, Heap, Object, Opaque, Storage, Value, View};

/// The most dimensions a tensor may have. Weights have up to five; PyTorch's limit is 64.
const RANK_MAX: usize = 8;

/// What a call comes to.
enum Made<'a> {
    /// Something that is there already.
    Value(Value<'a>),
    /// A new object.
    Object(Object<'a>),
}

type Call<'a> = Result<Made<'a>, String>;

/// What `callee(*args)` is. The error says what is wrong with the call.
pub(super) fn call<'a>(
    heap: &mut Heap<'a>,
    callee: Value<'a>,
    args: Value<'a>,
) -> Result<Value<'a>, String> {
    let made = match callee {
        Value::Global(global) => call_global(heap, global, args)?,
        // A method of something unknown, or the like.
        Value::Opaque(opaque) => unknown(opaque.global),
        other => return Err(format!("a call of {}", heap.describe(other))),
    };
    Ok(match made {
        Made::Value(value) => value,
        Made::Object(object) => heap.add(object),
    })
}

fn call_global<'a>(heap: &mut Heap<'a>, global: Global, args: Value<'a>) -> Call<'a> {
    let items = heap.tuple(args).unwrap_or_default();
    let made = match heap.meaning(global) {
        Meaning::RebuildTensor => rebuild_tensor(heap, items, None),
        Meaning::RebuildTensorOfDtype => rebuild_tensor_of_dtype(heap, items),
        Meaning::RebuildParameter => match items.first() {
            Some(&value) if is_tensor(heap, value) => Ok(Made::Value(value)),
            _ => Err("without a tensor".into()),
        },
        Meaning::RebuildFromType => match items {
            &[Value::Global(function), _, args, ..]
                if heap.meaning(function) != Meaning::RebuildFromType =>
            {
                return call_global(heap, function, args);
            }
            _ => Err("without a function that rebuilds".into()),
        },
        Meaning::OrderedDict => {
            let first = items.first().copied();
            ordered_dict(heap, first)
        }
        Meaning::Size => match items.first() {
            Some(&value) if heap.tuple(value).is_some() => Ok(Made::Value(value)),
            _ => Err("without a tuple".into()),
        },
        Meaning::Storage(_) | Meaning::Dtype(_) | Meaning::NeverTensor | Meaning::Unknown => {
            return Ok(unknown(global));
        }
    };
    made.map_err(|problem| format!("a call of `{}` {problem}", heap.name_of(global)))
}

fn unknown<'a>(global: Global) -> Made<'a> {
    let called = true;
    Made::Value(Value::Opaque(Opaque { global, called }))
}

fn is_tensor(heap: &Heap<'_>, value: Value<'_>) -> bool {
    matches!(value, Value::Opaque(_)) || matches!(heap.get(value), Some(Object::Tensor(_)))
}

/// `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks, metadata)`,
/// of which the shorter `_rebuild_tensor` has the first four.
fn rebuild_tensor<'a>(heap: &Heap<'a>, items: &[Value<'a>], dtype: Option<Dtype>) -> Call<'a> {
    let [storage, offset, size, stride, ..] = *items else {
        return Err(format!("with {} arguments", items.len()));
    };
    let storage = match (storage, heap.get(storage)) {
        // A storage of a class that is not known here: neither is the tensor.
        (Value::Opaque(opaque), _) => return Ok(unknown(opaque.global)),
        (_, Some(Object::Storage(storage))) => **storage,
        _ => return Err(format!("on {}", heap.describe(storage))),
    };
    let shape = sizes(heap, size)?;
    let strides = sizes(heap, stride)?;
    if shape.len() != strides.len() {
        let (dims, steps) = (shape.len(), strides.len());
        return Err(format!("with {dims} dimensions and {steps} strides"));
    }
    Ok(Made::Object(Object::Tensor(Box::new(View {
        storage,
        dtype: dtype.unwrap_or(storage.dtype),
        offset: natural(heap, offset)?,
        shape,
        strides,
    }))))
}

/// `_rebuild_tensor_v3`: the storage has no type, the seventh argument is the dtype.
fn rebuild_tensor_of_dtype<'a>(heap: &Heap<'a>, items: &[Value<'a>]) -> Call<'a> {
    let Some(&Value::Global(global)) = items.get(6) else {
        return Err("without a dtype".into());
    };
    match heap.meaning(global) {
        Meaning::Dtype(dtype) => rebuild_tensor(heap, items, Some(dtype)),
        _ => Ok(unknown(global)),
    }
}

fn natural(heap: &Heap<'_>, value: Value<'_>) -> Result<u64, String> {
    match value {
        Value::Int(number) => u64::try_from(number).map_err(|_| format!("with {number}")),
        other => Err(format!("with {} for a number", heap.describe(other))),
    }
}

fn sizes(heap: &Heap<'_>, value: Value<'_>) -> Result<Vec<usize>, String> {
    let Some(items) = heap.tuple(value) else {
        return Err(format!("with {} for a tuple", heap.describe(value)));
    };
    if items.len() > RANK_MAX {
        let dims = items.len();
        return Err(format!("with {dims} dimensions, more than {RANK_MAX}"));
    }
    let size = |&item| {
        let number = natural(heap, item)?;
        usize::try_from(number).map_err(|_| format!("with {number}"))
    };
    items.iter().map(size).collect()
}

/// `OrderedDict()`, or `OrderedDict(pairs)` as Python 2 wrote it.
///
/// The list of pairs is emptied into the dictionary: a copy of a list that a pickle shares could
/// be asked for a million times.
fn ordered_dict<'a>(heap: &mut Heap<'a>, first: Option<Value<'a>>) -> Call<'a> {
    let list = match first {
        None => Vec::new(),
        Some(value) => match heap.get_mut(value) {
            Some(Object::List(list)) => std::mem::take(list),
            _ => return Err(format!("with {}", heap.describe(value))),
        },
    };
    let pair = |&value: &Value<'a>| match heap.get(value) {
        Some(Object::List(pair) | Object::Tuple(pair)) if pair.len() == 2 => Ok((pair[0], pair[1])),
        _ => Err(format!("with {} for a pair", heap.describe(value))),
    };
    let pairs = list.iter().map(pair).collect::<Result<_, _>>()?;
    Ok(Made::Object(Object::Dict(pairs)))
}

/// What a persistent id stands for: `("storage", class, key, location, count[, part])`.
pub(super) fn persistent<'a>(heap: &mut Heap<'a>, id: Value<'a>) -> Result<Value<'a>, String> {
    let items = heap.tuple(id).unwrap_or_default();
    let [Value::Str("storage"), Value::Global(class), key, _location, count, ref more @ ..] =
        *items
    else {
        // The sources of a pickled module ("module", ..) are of no use here.
        return match items {
            [Value::Str("module"), Value::Global(class), ..] => Ok(Value::Global(*class)),
            _ => Err("a persistent id of an unknown kind".into()),
        };
    };
    let Value::Str(key) = key else {
        return Err(format!("a storage whose key is {}", heap.describe(key)));
    };
    let Meaning::Storage(dtype) = heap.meaning(class) else {
        let called = true;
        return Ok(Value::Opaque(Opaque {
            global: class,
            called,
        }));
    };
    let part = match more.first().copied() {
        None | Some(Value::None) => None,
        Some(part) => match heap.tuple(part) {
            // Of the part's own key nobody needs to know.
            Some(&[_, offset, count]) => Some((natural(heap, offset)?, natural(heap, count)?)),
            _ => return Err(format!("storage `{key}` with {}", heap.describe(part))),
        },
    };
    let storage = Storage {
        key,
        dtype,
        root_count: natural(heap, count)?,
        part,
    };
    Ok(heap.add(Object::Storage(Box::new(storage))))
}
