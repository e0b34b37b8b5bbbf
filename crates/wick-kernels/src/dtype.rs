//! The element type of stored weights.

/// How one weight is stored: little-endian, 1, 2 or 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// A whole number from -128 to 127; what it stands for is the caller's.
    I8,
}

impl WeightDtype {
    /// Bytes of one weight.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I8 => 1,
        }
    }

    /// The lower-case name: `f32`, `f16`, `bf16` or `i8`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
        }
    }
}
