//! The names that a pickle may refer to, and what they mean here.
//!
//! A name outside this list is no error: it may belong to an optimizer or to arguments beside the
//! weights. It stays a name, and what it makes stays opaque.

/// Element types of storages: name of the storage class, name of the dtype, as safetensors spells
/// it, bytes of an element. Dtypes with an empty first name have no storage class of their own.
const DTYPES: [(&str, &str, Dtype); 17] = [
    ("DoubleStorage", "float64", Dtype::new("F64", 8)),
    ("FloatStorage", "float32", Dtype::new("F32", 4)),
    ("HalfStorage", "float16", Dtype::new("F16", 2)),
    ("BFloat16Storage", "bfloat16", Dtype::new("BF16", 2)),
    ("LongStorage", "int64", Dtype::new("I64", 8)),
    ("IntStorage", "int32", Dtype::new("I32", 4)),
    ("ShortStorage", "int16", Dtype::new("I16", 2)),
    ("CharStorage", "int8", Dtype::new("I8", 1)),
    ("ByteStorage", "uint8", Dtype::new("U8", 1)),
    ("BoolStorage", "bool", Dtype::new("BOOL", 1)),
    ("ComplexFloatStorage", "complex64", Dtype::new("C64", 8)),
    ("ComplexDoubleStorage", "complex128", Dtype::new("C128", 16)),
    ("", "uint16", Dtype::new("U16", 2)),
    ("", "uint32", Dtype::new("U32", 4)),
    ("", "uint64", Dtype::new("U64", 8)),
    ("", "float8_e4m3fn", Dtype::new("F8_E4M3", 1)),
    ("", "float8_e5m2", Dtype::new("F8_E5M2", 1)),
];

/// Functions whose values are never weights, so that they may lie among them.
const NEVER_TENSORS: [(&str, &str); 15] = [
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy", "dtype"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("_codecs", "encode"),
    ("builtins", "set"),
    ("__builtin__", "set"),
    ("builtins", "complex"),
    ("builtins", "slice"),
    ("collections", "Counter"),
    ("collections", "defaultdict"),
    ("datetime", "datetime"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
];

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dtype {
    /// As safetensors spells it.
    pub(super) name: &'static str,
    /// Bytes of an element.
    pub(super) size_bytes: u64,
}

impl Dtype {
    const fn new(name: &'static str, size_bytes: u64) -> Self {
        Self { name, size_bytes }
    }
}

/// What a name means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// A class of storages.
    Storage(Dtype),
    /// A dtype as a value.
    Dtype(Dtype),
    /// `(storage, offset, size, stride, ..)` to a tensor.
    RebuildTensor,
    /// `(storage, offset, size, stride, _, _, dtype, ..)` to a tensor.
    RebuildTensorOfDtype,
    /// `(tensor, ..)` to the tensor.
    RebuildParameter,
    /// `(function, class, arguments, state)` to what the function returns.
    RebuildFromType,
    /// `()` or `(pairs,)` to a dictionary.
    OrderedDict,
    /// `(tuple,)` to the tuple.
    Size,
    /// Anything else, whose values are never weights.
    NeverTensor,
    /// Anything else.
    Unknown,
}

impl Meaning {
    /// Looks a name up.
    pub(super) fn of(module: &str, name: &str) -> Self {
        match (module, name) {
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => Self::RebuildTensor,
            ("torch._utils", "_rebuild_tensor_v3") => Self::RebuildTensorOfDtype,
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
                Self::RebuildParameter
            }
            ("torch._tensor", "_rebuild_from_type" | "_rebuild_from_type_v2")
            | ("torch.tensor", "_rebuild_from_type") => Self::RebuildFromType,
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch", "Size") => Self::Size,
            ("torch" | "torch.storage", "UntypedStorage" | "_UntypedStorage") => {
                Self::Storage(Dtype::new("U8", 1))
            }
            ("torch" | "torch.cuda", _) => Self::of_torch(module, name),
            _ => Self::of_others(module, name),
        }
    }

    fn of_torch(module: &str, name: &str) -> Self {
        for (storage, dtype_name, dtype) in DTYPES {
            if name == storage {
                return Self::Storage(dtype);
            }
            if name == dtype_name && module == "torch" {
                return Self::Dtype(dtype);
            }
        }
        Self::of_others(module, name)
    }

    fn of_others(module: &str, name: &str) -> Self {
        if NEVER_TENSORS.contains(&(module, name)) {
            Self::NeverTensor
        } else {
            Self::Unknown
        }
    }
}
