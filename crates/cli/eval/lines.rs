//! Lines of a file that may be anything: none is longer than memory should bear.

use std::io::{self, BufRead, Read};

/// More than any line of an evaluation set.
const LINE_BYTES_MAX: usize = 16 << 20;

/// Lines as bytes, without their ends.
pub(super) struct Lines<R> {
    reader: R,
    line: Vec<u8>,
    /// Of the last line, from 1.
    number: u64,
    bytes_read: u64,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            line: Vec::new(),
            number: 0,
            bytes_read: 0,
        }
    }

    /// The next line and whether its end was there; `None` at the end of the file.
    pub(super) fn next_line(&mut self) -> io::Result<Option<(&[u8], bool)>> {
        self.line.clear();
        let limit = LINE_BYTES_MAX as u64 + 1;
        let mut limited = (&mut self.reader).take(limit);
        let count = limited.read_until(b'\n', &mut self.line)?;
        self.number += 1;
        self.bytes_read += count as u64;
        if count == 0 {
            return Ok(None);
        }
        let is_complete = self.line.last() == Some(&b'\n');
        if is_complete {
            self.line.pop();
        } else if count > LINE_BYTES_MAX {
            let text = format!("longer than {} MiB", LINE_BYTES_MAX >> 20);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(Some((&self.line, is_complete)))
    }

    /// The number of the last line, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Bytes of all lines so far, with their ends.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_without_their_ends_and_an_end_that_is_missing_is_told() {
        let mut lines = Lines::new(&b"ab\n\nlast"[..]);
        let mut all = Vec::new();
        while let Some((line, is_complete)) = lines.next_line().unwrap() {
            all.push((line.to_vec(), is_complete));
        }
        let expected = [(&b"ab"[..], true), (b"", true), (b"last", false)];
        assert_eq!(all.len(), expected.len());
        for ((line, is_complete), expected) in all.iter().zip(expected) {
            assert_eq!((&line[..], *is_complete), expected);
        }
        assert_eq!(lines.bytes_read(), 8);
    }

    #[test]
    fn a_line_without_an_end_in_sight_is_refused() {
        let endless = io::BufReader::new(io::repeat(b'x'));
        let mut lines = Lines::new(endless);
        let error = lines.next_line().unwrap_err().to_string();
        assert!(error.contains("16 MiB"), "{error}");
        assert_eq!(lines.number(), 1);
        // One of exactly the limit is fine.
        let mut text = vec![b'x'; LINE_BYTES_MAX];
        text.push(b'\n');
        let mut lines = Lines::new(&text[..]);
        assert!(lines.next_line().unwrap().unwrap().1);
    }
}
