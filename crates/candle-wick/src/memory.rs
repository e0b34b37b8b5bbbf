//! An amount of memory as a person writes it: bytes, or a share of the model's weights.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// `4GiB`, `512MiB`, `300MB`, plain bytes, or `60%`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Memory {
    /// The peak resident set of the whole process.
    Bytes(u64),
    /// The weights held in DRAM, as a share of the dense model's bytes.
    Percent(f64),
}

const UNITS: [(&str, u64); 10] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
    ("", 1),
];

impl FromStr for Memory {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = || Error::UnknownName {
            what: "amount of memory",
            name: text.to_owned(),
            known: "4GiB, 512MiB, 300MB, a number of bytes, or 60% of the weights",
        };
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let number: f64 = number.parse().map_err(|_| refuse())?;
        let unit = unit.trim().to_ascii_lowercase();
        if unit == "%" {
            return if number > 0.0 && number <= 100.0 {
                Ok(Self::Percent(number))
            } else {
                Err(refuse())
            };
        }
        let (_, scale) = UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .ok_or_else(refuse)?;
        let bytes = number * *scale as f64;
        if bytes < 1.0 || bytes > u64::MAX as f64 / 2.0 {
            return Err(refuse());
        }
        Ok(Self::Bytes(bytes as u64))
    }
}

/// As [`FromStr`] reads it back: plain bytes, or `60%`.
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes}"),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// A number of bytes with three digits and a binary unit.
pub struct HumanBytes(
    /// The bytes.
    pub u64,
);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        let mut unit = "B";
        for next in ["KiB", "MiB", "GiB", "TiB"] {
            if value < 1024.0 {
                break;
            }
            value /= 1024.0;
            unit = next;
        }
        if unit == "B" {
            write!(f, "{} B", self.0)
        } else {
            write!(f, "{value:.1} {unit}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("4GiB", 4 << 30),
            ("512 MiB", 512 << 20),
            ("300MB", 300_000_000),
            ("1000", 1000),
            ("1.5kib", 1536),
        ] {
            assert_eq!(
                text.parse::<Memory>().unwrap(),
                Memory::Bytes(bytes),
                "{text}"
            );
        }
        assert_eq!("60%".parse::<Memory>().unwrap(), Memory::Percent(60.0));
        for text in [
            "",
            "GiB",
            "-1",
            "0",
            "0%",
            "101%",
            "4 cats",
            "nan",
            "1e400",
            "99999999999TiB",
        ] {
            assert!(text.parse::<Memory>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_it_prints_is_read_back() {
        for memory in [
            Memory::Bytes(1),
            Memory::Bytes((3 << 40) + 1),
            Memory::Percent(60.0),
            Memory::Percent(100.0 / 3.0),
        ] {
            assert_eq!(memory.to_string().parse::<Memory>().unwrap(), memory);
        }
    }

    #[test]
    fn prints_three_digits() {
        assert_eq!(HumanBytes(999).to_string(), "999 B");
        assert_eq!(HumanBytes(3 << 20).to_string(), "3.0 MiB");
    }
}
