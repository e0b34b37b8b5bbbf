//! A position in a file's bytes that never runs past their end.
//!
//! Numbers are little-endian. Nothing is copied but numbers.

use crate::CheckpointError;

/// Reads forward; positions are absolute in the file.
#[derive(Clone, Debug)]
pub(crate) struct Bytes<'a> {
    data: &'a [u8],
    position: usize,
}

impl<'a> Bytes<'a> {
    /// Reads `data` from its start.
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self { data, position: 0 }
    }

    /// Reads `data` from byte `position`, or from its end where it is shorter.
    pub(crate) fn starting_at(data: &'a [u8], position: usize) -> Self {
        let position = position.min(data.len());
        Self { data, position }
    }

    /// Where the next byte lies.
    pub(crate) fn position(&self) -> u64 {
        self.position as u64
    }

    /// How many bytes follow.
    pub(crate) fn left(&self) -> u64 {
        self.rest().len() as u64
    }

    /// The bytes that follow.
    pub(crate) fn rest(&self) -> &'a [u8] {
        &self.data[self.position..]
    }

    /// The next `len` bytes.
    pub(crate) fn take(
        &mut self,
        what: &'static str,
        len: u64,
    ) -> Result<&'a [u8], CheckpointError> {
        let taken = usize::try_from(len)
            .ok()
            .and_then(|len| self.rest().get(..len));
        let Some(taken) = taken else {
            return Err(CheckpointError::CutShort {
                what,
                offset_bytes: self.position(),
                needed_bytes: len,
                left_bytes: self.left(),
            });
        };
        self.position += taken.len();
        Ok(taken)
    }

    /// The next `N` bytes, by value.
    pub(crate) fn array<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], CheckpointError> {
        let taken = self.take(what, N as u64)?;
        Ok(taken.try_into().expect("take returns the length asked for"))
    }

    /// A byte.
    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, CheckpointError> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    /// Two bytes.
    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, CheckpointError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    /// Four bytes.
    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    /// Eight bytes.
    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things of at least `each_bytes` bytes, all of which must fit into what follows.
    pub(crate) fn count(
        &mut self,
        what: &'static str,
        each_bytes: u64,
    ) -> Result<usize, CheckpointError> {
        let offset_bytes = self.position();
        let got = self.u64(what)?;
        let limit = self.left() / each_bytes;
        match usize::try_from(got) {
            Ok(count) if got <= limit => Ok(count),
            _ => Err(CheckpointError::Count {
                what,
                offset_bytes,
                got,
                limit,
            }),
        }
    }
}
