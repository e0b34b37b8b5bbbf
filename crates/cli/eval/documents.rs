//! Documents of an evaluation set: JSON lines, one a choice, as OLMo's evaluations have them, gzip or plain.
//!
//! Of a line these are read: `doc_id`, `idx` (the choice's number), `label` (that of the right one) and
//! `request.context` and `request.continuation`. Choices of a document follow each other; documents ascend. Lines
//! whose `doc_id` is 1,000,000 or more repeat a document without its context, for another measure, and are left out.
//!
//! The file is read as documents are asked for: nothing is held but one of them.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, ensure, Context, Result};
use flate2::bufread::MultiGzDecoder;
use serde::Deserialize;
use serde_json::Value;

use super::lines::Lines;

/// Ids from here on are repetitions.
const REPEATED_FROM: u64 = 1_000_000;
/// More text than any document has.
const DOCUMENT_BYTES_MAX: usize = 64 << 20;
/// More than any evaluation set, and little enough to read through.
const FILE_BYTES_MAX: u64 = 8 << 30;
/// How a gzip file starts.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// A context and a continuation, as text.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) context: String,
    pub(super) continuation: String,
    /// Of the file, from 1; not read from the line itself.
    #[serde(skip)]
    pub(super) line: u64,
}

/// A document and its choices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Document {
    pub(super) id: u64,
    pub(super) choices: Vec<Choice>,
    /// The right choice; `None` where the file has no number for it.
    pub(super) label: Option<u64>,
}

/// What is read of a line.
#[derive(Deserialize)]
struct Line {
    doc_id: u64,
    #[serde(default)]
    idx: u64,
    label: Option<Value>,
    request: Choice,
}

/// A line's document, read before the rest: repetitions may have any other form.
#[derive(Deserialize)]
struct LineId {
    doc_id: u64,
}

/// The documents of a file, in order.
pub(super) struct Documents {
    path: PathBuf,
    lines: Lines<Box<dyn BufRead>>,
    /// Documents from this id on are left out.
    limit: u64,
    /// The first choice of the next document.
    pending: Option<Line>,
    is_done: bool,
}

impl Documents {
    /// Those of the file at `path` whose ids are below `limit`.
    pub(super) fn open(path: &Path, limit: Option<u64>) -> Result<Self> {
        let named = || path.display().to_string();
        let mut file = BufReader::new(File::open(path).with_context(named)?);
        let is_gzip = file
            .fill_buf()
            .with_context(named)?
            .starts_with(&GZIP_MAGIC);
        let reader: Box<dyn BufRead> = match is_gzip {
            true => Box::new(BufReader::new(MultiGzDecoder::new(file))),
            false => Box::new(file),
        };
        Ok(Self {
            path: path.to_owned(),
            lines: Lines::new(reader),
            limit: limit.unwrap_or(u64::MAX).min(REPEATED_FROM),
            pending: None,
            is_done: false,
        })
    }

    /// The next line of a document below the limit; `None` when there is no more.
    fn next_line(&mut self) -> Result<Option<Line>> {
        while !self.is_done {
            let number = self.lines.number() + 1;
            let at = || format!("{}, line {number}", self.path.display());
            ensure!(
                self.lines.bytes_read() <= FILE_BYTES_MAX,
                "{} holds more than {} GiB",
                self.path.display(),
                FILE_BYTES_MAX >> 30
            );
            let Some((bytes, _)) = self.lines.next_line().with_context(at)? else {
                break;
            };
            if bytes.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let parsed = parse(bytes, self.limit).with_context(at)?;
            match parsed {
                Parsed::Line(mut line) => {
                    line.request.line = number;
                    return Ok(Some(line));
                }
                Parsed::Repeated => {}
                // Ids ascend, so all others are beyond it as well.
                Parsed::BeyondLimit => break,
            }
        }
        self.is_done = true;
        Ok(None)
    }

    fn next_document(&mut self) -> Result<Option<Document>> {
        let first = match self.pending.take() {
            Some(first) => Some(first),
            None => self.next_line()?,
        };
        let Some(first) = first else {
            return Ok(None);
        };
        let id = first.doc_id;
        let label = first.label.as_ref().and_then(Value::as_u64);
        let mut document = Document {
            id,
            choices: Vec::new(),
            label,
        };
        let mut bytes = 0;
        let mut line = Some(first);
        while let Some(choice) = line {
            if choice.doc_id != id {
                ensure!(
                    choice.doc_id > id,
                    "{}, line {}: document {} after {id}; ids ascend",
                    self.path.display(),
                    self.lines.number(),
                    choice.doc_id
                );
                self.pending = Some(choice);
                break;
            }
            bytes += size_of::<Choice>();
            bytes += choice.request.context.len() + choice.request.continuation.len();
            let checked = check(&choice, &document, bytes);
            checked.with_context(|| {
                format!("{}, line {}", self.path.display(), self.lines.number())
            })?;
            document.choices.push(choice.request);
            line = self.next_line()?;
        }
        Ok(Some(document))
    }
}

impl Iterator for Documents {
    type Item = Result<Document>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.next_document().transpose();
        if let Some(Err(_)) = next {
            // What follows a broken line means nothing.
            (self.is_done, self.pending) = (true, None);
        }
        next
    }
}

enum Parsed {
    Line(Line),
    Repeated,
    BeyondLimit,
}

fn parse(bytes: &[u8], limit: u64) -> Result<Parsed> {
    let LineId { doc_id } = serde_json::from_slice(bytes).map_err(without_line)?;
    if doc_id >= REPEATED_FROM {
        return Ok(Parsed::Repeated);
    }
    if doc_id >= limit {
        return Ok(Parsed::BeyondLimit);
    }
    let line = serde_json::from_slice(bytes).map_err(without_line)?;
    Ok(Parsed::Line(line))
}

/// What is wrong, without the line that the parser counts from the line's own start.
fn without_line(error: serde_json::Error) -> anyhow::Error {
    let text = error.to_string();
    let sentence = text.split(" at line ").next().unwrap_or(&text);
    anyhow!("{sentence} at column {}", error.column())
}

/// Refuses a choice that cannot be the next one of `document`, with which its text has `bytes`.
fn check(choice: &Line, document: &Document, bytes: usize) -> Result<()> {
    let (id, next) = (document.id, document.choices.len() as u64);
    ensure!(
        choice.idx == next,
        "choice {} of document {id} where {next} should be",
        choice.idx
    );
    ensure!(
        choice.label.as_ref().and_then(Value::as_u64) == document.label,
        "document {id} has another label than before"
    );
    ensure!(
        !choice.request.continuation.is_empty(),
        "the continuation of choice {next} of document {id} is empty"
    );
    ensure!(
        bytes <= DOCUMENT_BYTES_MAX,
        "document {id} has more than {} MiB of text",
        DOCUMENT_BYTES_MAX >> 20
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;

    use super::*;

    fn line(doc_id: u64, idx: u64, label: &str) -> String {
        format!(
            r#"{{"request_type":"loglikelihood","doc":{{"gold":0}},"request":{{"context":"c{doc_id}","continuation":" {idx}"}},"idx":{idx},"doc_id":{doc_id},"label":{label}}}"#
        )
    }

    fn read(bytes: &[u8], limit: Option<u64>) -> Result<Vec<Document>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        Documents::open(file.path(), limit)?.collect()
    }

    fn good() -> String {
        let lines = [
            line(0, 0, "1"),
            line(0, 1, "1"),
            line(1_000_000, 0, "1"),
            line(2, 0, "[\"word\"]"),
            line(7, 0, "0"),
        ];
        lines.join("\n") + "\n\n"
    }

    #[test]
    fn plain_and_gzip_files_say_the_same() {
        let plain = read(good().as_bytes(), None).unwrap();
        let ids: Vec<u64> = plain.iter().map(|document| document.id).collect();
        assert_eq!(ids, [0, 2, 7]);
        assert_eq!((plain[0].choices.len(), plain[0].label), (2, Some(1)));
        assert_eq!(plain[0].choices[1].continuation, " 1");
        let lines = plain.iter().flat_map(|document| &document.choices);
        let lines: Vec<u64> = lines.map(|choice| choice.line).collect();
        assert_eq!(lines, [1, 2, 4, 5]);
        assert_eq!(plain[1].label, None);
        // Two members, as tools that append write them.
        let half = good().len() / 2;
        let mut gzip = Vec::new();
        for part in [&good()[..half], &good()[half..]] {
            let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(part.as_bytes()).unwrap();
            gzip.extend(encoder.finish().unwrap());
        }
        assert_eq!(read(&gzip, None).unwrap(), plain);
        assert_eq!(read(good().as_bytes(), Some(7)).unwrap(), plain[..2]);
        assert_eq!(read(b"", None).unwrap(), []);
    }

    #[test]
    fn hostile_files_are_refused_with_the_line() {
        let mut cut = GzEncoder::new(Vec::new(), flate2::Compression::fast());
        cut.write_all(good().as_bytes()).unwrap();
        let mut cut = cut.finish().unwrap();
        cut.truncate(cut.len() / 2);
        let cases: [(Vec<u8>, &str); 9] = [
            (b"{\n".to_vec(), "line 1: EOF while parsing"),
            (b"\xff\xfe\n".to_vec(), "line 1: expected value"),
            (
                br#"{"doc_id":0,"idx":0,"label":0,"request":{"context":"c"}}"#.to_vec(),
                "missing field `continuation`",
            ),
            (
                br#"{"idx":0,"label":0,"request":{"context":"c","continuation":"d"}}"#.to_vec(),
                "missing field `doc_id`",
            ),
            (
                line(0, 0, "0").replace("\" 0\"", "\"\"").into_bytes(),
                "continuation of choice 0 of document 0 is empty",
            ),
            (
                line(0, 1, "0").into_bytes(),
                "choice 1 of document 0 where 0",
            ),
            (
                [line(0, 0, "0"), line(0, 1, "1")].join("\n").into_bytes(),
                "line 2: document 0 has another label",
            ),
            (
                [line(3, 0, "0"), line(2, 0, "1")].join("\n").into_bytes(),
                "line 2: document 2 after 3",
            ),
            (cut, "line 1"),
        ];
        for (bytes, expected) in cases {
            let error = format!("{:#}", read(&bytes, None).unwrap_err());
            assert!(error.contains(expected), "{error}: {expected}");
        }
    }

    #[test]
    fn a_small_file_that_unpacks_to_an_endless_line_is_refused() {
        let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let zeros = vec![b' '; 1 << 20];
        for _ in 0..17 {
            encoder.write_all(&zeros).unwrap();
        }
        let bomb = encoder.finish().unwrap();
        assert!(bomb.len() < 1 << 18);
        let error = format!("{:#}", read(&bomb, None).unwrap_err());
        assert!(error.contains("line 1: longer than 16 MiB"), "{error}");
    }
}
