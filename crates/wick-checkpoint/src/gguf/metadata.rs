//! The metadata of a GGUF file: values under keys, and getters that say what is wrong.

use std::collections::BTreeMap;

use crate::CheckpointError;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// 8 bits.
    U8(u8),
    /// 8 bits, signed.
    I8(i8),
    /// 16 bits.
    U16(u16),
    /// 16 bits, signed.
    I16(i16),
    /// 32 bits.
    U32(u32),
    /// 32 bits, signed.
    I32(i32),
    /// 64 bits.
    U64(u64),
    /// 64 bits, signed.
    I64(i64),
    /// A float of 32 bits.
    F32(f32),
    /// A float of 64 bits.
    F64(f64),
    /// True or false.
    Bool(bool),
    /// Text.
    String(String),
    /// Values of one type, such as a vocabulary.
    Array(Vec<MetadataValue>),
}

impl MetadataValue {
    /// The kind of value, for messages.
    fn describe(&self) -> String {
        match self {
            Self::String(_) => "a string".into(),
            Self::Array(items) => match items.first() {
                Some(first) => format!("{} values, the first is {}", items.len(), first.describe()),
                None => "an empty array".into(),
            },
            Self::F32(value) => format!("the float {value}"),
            Self::F64(value) => format!("the float {value}"),
            Self::Bool(value) => format!("{value}"),
            Self::U8(_) | Self::I8(_) | Self::U16(_) | Self::I16(_) => self.describe_integer(),
            Self::U32(_) | Self::I32(_) | Self::U64(_) | Self::I64(_) => self.describe_integer(),
        }
    }

    fn describe_integer(&self) -> String {
        format!("the integer {}", self.integer().unwrap_or_default())
    }

    /// The number of any integer type.
    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(value) => value.into(),
            Self::I8(value) => value.into(),
            Self::U16(value) => value.into(),
            Self::I16(value) => value.into(),
            Self::U32(value) => value.into(),
            Self::I32(value) => value.into(),
            Self::U64(value) => value.into(),
            Self::I64(value) => value.into(),
            _ => return None,
        })
    }
}

/// A type that [`Metadata::get`] returns.
pub trait FromMetadata<'a>: Sized {
    /// What is expected, for messages.
    const EXPECTED: &'static str;

    /// The value as this type, if it is of a kind that holds it.
    fn from_metadata(value: &'a MetadataValue) -> Option<Self>;
}

impl<'a> FromMetadata<'a> for u64 {
    const EXPECTED: &'static str = "an integer of at least 0";

    fn from_metadata(value: &'a MetadataValue) -> Option<Self> {
        value.integer().and_then(|number| number.try_into().ok())
    }
}

impl<'a> FromMetadata<'a> for i64 {
    const EXPECTED: &'static str = "an integer";

    fn from_metadata(value: &'a MetadataValue) -> Option<Self> {
        value.integer().and_then(|number| number.try_into().ok())
    }
}

impl<'a> FromMetadata<'a> for usize {
    const EXPECTED: &'static str = "an integer of at least 0";

    fn from_metadata(value: &'a MetadataValue) -> Option<Self> {
        value.integer().and_then(|number| number.try_into().ok())
    }
}

impl<'a> FromMetadata<'a> for f64 {
    const EXPECTED: &'static str = "a float";

    fn from_metadata(value: &'a MetadataValue) -> Option<Self> {
        match *value {
            MetadataValue::F32(value) => Some(value.into()),
            MetadataValue::F64(value) => Some(value),
            _ => None,
        }
    }
}

impl<'a> FromMetadata<'a> for bool {
    const EXPECTED: &'static str = "true or false";

    fn from_metadata(value: &'a MetadataValue) -> Option<Self> {
        match *value {
            MetadataValue::Bool(value) => Some(value),
            _ => None,
        }
    }
}

impl<'a> FromMetadata<'a> for &'a str {
    const EXPECTED: &'static str = "a string";

    fn from_metadata(value: &'a MetadataValue) -> Option<Self> {
        match value {
            MetadataValue::String(text) => Some(text),
            _ => None,
        }
    }
}

/// An array whose values are all of one of the types above.
impl<'a, T: FromMetadata<'a>> FromMetadata<'a> for Vec<T> {
    const EXPECTED: &'static str = "an array of the right type";

    fn from_metadata(value: &'a MetadataValue) -> Option<Self> {
        match value {
            MetadataValue::Array(items) => items.iter().map(T::from_metadata).collect(),
            _ => None,
        }
    }
}

/// The metadata by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(pub BTreeMap<String, MetadataValue>);

impl Metadata {
    /// The value of a key that must be there.
    ///
    /// # Errors
    /// There is no such key, or its value is of another kind.
    ///
    /// ```
    /// # use wick_checkpoint::{Metadata, MetadataValue};
    /// # let rank = ("llama.block_count".to_string(), MetadataValue::U32(30));
    /// # let metadata = Metadata([rank].into());
    /// assert_eq!(metadata.get::<usize>("llama.block_count").unwrap(), 30);
    /// let error = metadata.get::<&str>("llama.block_count").unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "metadata `llama.block_count` is the integer 30, expected a string"
    /// );
    /// ```
    pub fn get<'a, T: FromMetadata<'a>>(&'a self, key: &str) -> Result<T, CheckpointError> {
        self.find(key)?.ok_or_else(|| CheckpointError::Metadata {
            key: key.into(),
            got: "missing".into(),
            expected: T::EXPECTED.into(),
        })
    }

    /// The value of a key that may be missing.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn find<'a, T: FromMetadata<'a>>(
        &'a self,
        key: &str,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.0.get(key) else {
            return Ok(None);
        };
        match T::from_metadata(value) {
            Some(found) => Ok(Some(found)),
            None => Err(CheckpointError::Metadata {
                key: key.into(),
                got: value.describe(),
                expected: T::EXPECTED.into(),
            }),
        }
    }
}
