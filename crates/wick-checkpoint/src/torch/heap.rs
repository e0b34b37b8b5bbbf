//! The values of a pickle: small handles to objects that lie in one arena.
//!
//! Handles are copied freely, so that an object shared a thousand times costs a thousand handles;
//! nothing here follows handles deeper than it must, so that neither depth nor cycles matter.

use super::globals::{Dtype, Meaning};

/// A value.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits: two's complement, little-endian.
    LongInt(&'a [u8]),
    Str(&'a str),
    /// A float, bytes or a set: read over.
    Plain,
    Global(Global),
    Opaque(Opaque),
    Object(ObjectId),
}

/// Index of a name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Global(u32);

/// Something made by a name that has no meaning here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opaque {
    pub(super) global: Global,
    /// Whether it is what a function returned, and so could be anything.
    pub(super) called: bool,
}

/// Index of an object.
#[derive(Clone, Copy, Debug)]
pub(super) struct ObjectId(u32);

/// An object.
#[derive(Clone, Debug)]
pub(super) enum Object<'a> {
    List(Vec<Value<'a>>),
    Tuple(Vec<Value<'a>>),
    /// Pairs as they were set: the last one of a key counts.
    Dict(Vec<(Value<'a>, Value<'a>)>),
    Storage(Box<Storage<'a>>),
    Tensor(Box<View<'a>>),
}

/// A run of elements that lies outside the pickle, under a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storage<'a> {
    pub(super) key: &'a str,
    pub(super) dtype: Dtype,
    /// Elements under the key.
    pub(super) root_count: u64,
    /// First element and element count, when this is only a part of what lies under the key.
    pub(super) part: Option<(u64, u64)>,
}

/// A tensor: a view of a storage.
#[derive(Clone, Debug)]
pub(super) struct View<'a> {
    pub(super) storage: Storage<'a>,
    pub(super) dtype: Dtype,
    /// First element.
    pub(super) offset: u64,
    pub(super) shape: Vec<usize>,
    /// As long as `shape`.
    pub(super) strides: Vec<usize>,
}

/// The arena.
#[derive(Debug, Default)]
pub(super) struct Heap<'a> {
    objects: Vec<Object<'a>>,
    names: Vec<(&'a str, &'a str, Meaning)>,
}

impl<'a> Heap<'a> {
    /// Adds an object.
    pub(super) fn add(&mut self, object: Object<'a>) -> Value<'a> {
        let id = u32::try_from(self.objects.len()).expect("the machine runs fewer opcodes");
        self.objects.push(object);
        Value::Object(ObjectId(id))
    }

    /// Adds a name.
    pub(super) fn add_global(&mut self, module: &'a str, name: &'a str) -> Value<'a> {
        let index = u32::try_from(self.names.len()).expect("the machine runs fewer opcodes");
        let meaning = Meaning::of(module, name);
        self.names.push((module, name, meaning));
        Value::Global(Global(index))
    }

    /// The object behind a handle.
    pub(super) fn object(&self, id: ObjectId) -> &Object<'a> {
        &self.objects[id.0 as usize]
    }

    /// All objects.
    pub(super) fn objects(&self) -> &[Object<'a>] {
        &self.objects
    }

    /// The object of a value that is one.
    pub(super) fn get(&self, value: Value<'a>) -> Option<&Object<'a>> {
        match value {
            Value::Object(id) => Some(self.object(id)),
            _ => None,
        }
    }

    /// The object of a value that is one.
    pub(super) fn get_mut(&mut self, value: Value<'a>) -> Option<&mut Object<'a>> {
        match value {
            Value::Object(id) => self.objects.get_mut(id.0 as usize),
            _ => None,
        }
    }

    /// The elements of a tuple.
    pub(super) fn tuple(&self, value: Value<'a>) -> Option<&[Value<'a>]> {
        match self.get(value) {
            Some(Object::Tuple(items)) => Some(items),
            _ => None,
        }
    }

    /// The pairs of a dictionary.
    pub(super) fn dict(&self, value: Value<'a>) -> Option<&[(Value<'a>, Value<'a>)]> {
        match self.get(value) {
            Some(Object::Dict(pairs)) => Some(pairs),
            _ => None,
        }
    }

    /// What a name means.
    pub(super) fn meaning(&self, global: Global) -> Meaning {
        self.names[global.0 as usize].2
    }

    /// Module and name with a dot between them.
    pub(super) fn name_of(&self, global: Global) -> String {
        let (module, name, _) = self.names[global.0 as usize];
        format!("{module}.{name}")
    }

    /// Whether this may be a tensor: what an unknown function returned, or an object of a class of
    /// torch's that is no optimizer's.
    pub(super) fn may_be_tensor(&self, opaque: Opaque) -> bool {
        let (module, _, meaning) = self.names[opaque.global.0 as usize];
        let of_torch = module == "torch"
            || (module.starts_with("torch.") && !module.starts_with("torch.optim"));
        meaning != Meaning::NeverTensor && (opaque.called || of_torch)
    }

    /// The kind of a value, for messages.
    pub(super) fn describe(&self, value: Value<'a>) -> String {
        let kind = match value {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(number) => return format!("the number {number}"),
            Value::LongInt(_) => "a number beyond 64 bits",
            Value::Str(_) => "a string",
            Value::Plain => "a float, bytes or a set",
            Value::Global(global) => return format!("`{}`", self.name_of(global)),
            Value::Opaque(opaque) => {
                return format!("an object of `{}`", self.name_of(opaque.global))
            }
            Value::Object(id) => match self.object(id) {
                Object::List(_) => "a list",
                Object::Tuple(_) => "a tuple",
                Object::Dict(_) => "a dictionary",
                Object::Storage(_) => "a storage",
                Object::Tensor(_) => "a single tensor",
            },
        };
        kind.into()
    }
}
