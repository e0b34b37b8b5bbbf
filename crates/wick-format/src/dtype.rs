//! Element types: [`Dtype`] for weights, [`StoredDtype`] for everything a file of ours may hold.
//!
//! All are little-endian. The manifest writes `f32`, safetensors headers write `F32`.

use serde::{Deserialize, Serialize};

use crate::FormatError;

/// Element type of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision, 4 bytes.
    F32,
    /// IEEE half precision, 2 bytes.
    F16,
    /// The upper half of a single, 2 bytes.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Name in the manifest and on the command line: `f32`, `f16`, `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Name in a safetensors header: `F32`, `F16`, `BF16`.
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl TryFrom<&str> for Dtype {
    type Error = FormatError;

    /// Accepts both spellings, `f16` and `F16`.
    fn try_from(name: &str) -> Result<Self, FormatError> {
        match name {
            "f32" | "F32" => Ok(Self::F32),
            "f16" | "F16" => Ok(Self::F16),
            "bf16" | "BF16" => Ok(Self::Bf16),
            other => Err(FormatError::UnknownDtype {
                tensor: "dtype".into(),
                got: other.into(),
                expected: "f32, f16, bf16",
            }),
        }
    }
}

impl std::str::FromStr for Dtype {
    type Err = FormatError;

    fn from_str(name: &str) -> Result<Self, FormatError> {
        Self::try_from(name)
    }
}

/// Element type of a tensor in one of our safetensors files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredDtype {
    /// Weights in single precision.
    F32,
    /// Weights in half precision.
    F16,
    /// Weights in bfloat16.
    Bf16,
    /// Bytes: records and padding.
    U8,
    /// Whole numbers from -128 to 127: matrices with a scale a row.
    I8,
    /// Checksums.
    U32,
}

impl StoredDtype {
    /// The names of all of them, for messages.
    pub(crate) const NAMES: &'static str = "F32, F16, BF16, U8, I8, U32";

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 | Self::I8 => 1,
        }
    }

    /// Name in a safetensors header.
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::U32 => "U32",
        }
    }

    /// The dtype with this safetensors name.
    pub fn from_safetensors_name(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::Bf16),
            "U8" => Some(Self::U8),
            "I8" => Some(Self::I8),
            "U32" => Some(Self::U32),
            _ => None,
        }
    }

    /// The weight dtype, `None` for what means nothing without a scale, and for checksums.
    pub const fn weight(self) -> Option<Dtype> {
        match self {
            Self::F32 => Some(Dtype::F32),
            Self::F16 => Some(Dtype::F16),
            Self::Bf16 => Some(Dtype::Bf16),
            Self::U8 | Self::I8 | Self::U32 => None,
        }
    }
}

impl From<Dtype> for StoredDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

impl std::fmt::Display for StoredDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.safetensors_name())
    }
}

/// The values of a U32 tensor; bytes beyond the last whole value are left out.
pub fn u32_values(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            assert_eq!(Dtype::try_from(dtype.name()).unwrap(), dtype);
            assert_eq!(dtype.safetensors_name().parse::<Dtype>().unwrap(), dtype);
            assert_eq!(StoredDtype::from(dtype).weight(), Some(dtype));
            assert_eq!(StoredDtype::from(dtype).size_bytes(), dtype.size_bytes());
        }
        for stored in [StoredDtype::U8, StoredDtype::I8, StoredDtype::U32] {
            let name = stored.safetensors_name();
            assert_eq!(StoredDtype::from_safetensors_name(name), Some(stored));
            assert_eq!(stored.weight(), None);
        }
        assert!(Dtype::try_from("f64").is_err());
    }
}
