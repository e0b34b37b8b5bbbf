//! Hashes and checksums: xxh3 names a whole file, crc32c guards what is read at once.

use xxhash_rust::xxh3::Xxh3;

/// The crc32c (Castagnoli) of some bytes, as stored in the checksum tensors.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// The 64-bit xxh3 (seed 0) of bytes that come piece by piece, as 16 lower-case hex digits.
#[derive(Clone, Default)]
pub struct FileHasher(Xxh3);

impl FileHasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of everything so far.
    pub fn hex(&self) -> String {
        format!("{:016x}", self.0.digest())
    }
}

impl std::fmt::Debug for FileHasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileHasher({})", self.hex())
    }
}

/// Whether this is a hash as [`FileHasher::hex`] writes it.
pub(crate) fn is_hex(text: &str) -> bool {
    text.len() == 16
        && text
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(FileHasher::new().hex(), "2d06800538d394c2");
    }

    #[test]
    fn pieces_do_not_matter() {
        let bytes: Vec<u8> = (0..5000u32).map(|i| (i * 7 % 251) as u8).collect();
        let mut whole = FileHasher::new();
        whole.update(&bytes);
        let mut pieces = FileHasher::new();
        bytes.chunks(37).for_each(|piece| pieces.update(piece));
        assert_eq!(whole.hex(), pieces.hex());
        assert!(is_hex(&whole.hex()));
        assert!(!is_hex("2D06800538D394C2"));
    }
}
