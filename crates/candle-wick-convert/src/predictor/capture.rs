//! The inputs of every FFN on a text, one temporary file a layer: one layer's inputs are in memory at a time.
//!
//! Room for all of them is asked for before the model runs.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle::{Device, Tensor};
use candle_wick::PredictorInput;
use candle_wick_models::LoadedModel;
use wick_format::FfnLayer;

use super::parts::count;
use crate::output::room_bytes;
use crate::ConvertError;

/// Bytes of a value.
const VALUE_BYTES: usize = 4;

/// Files with f32 rows of one layer's inputs each, removed when dropped.
pub(super) struct Capture {
    files: Vec<File>,
    /// Values of a row, by layer.
    widths: Vec<usize>,
}

/// What the recorder writes to; it cannot return an error, so the first one waits here.
struct Sink {
    files: Vec<BufWriter<File>>,
    error: Option<io::Error>,
}

impl Capture {
    /// What each FFN sees while `run` takes the model over `tokens` tokens: a capture for each of `kinds`, in files in `folder`.
    ///
    /// # Errors
    /// `folder` has no room for them, which is found out before `run` is called, or cannot be written to; and those of `run`.
    pub(super) fn record(
        model: &mut LoadedModel,
        folder: &Path,
        tokens: usize,
        kinds: &[PredictorInput],
        run: impl FnOnce(&mut LoadedModel) -> Result<(), ConvertError>,
    ) -> Result<Vec<Self>, ConvertError> {
        let layers = &model.folder().manifest().layers;
        let needed_bytes = kinds.len() as u64 * captured_bytes(layers, tokens);
        check_room(folder, needed_bytes, room_bytes(folder), tokens)?;
        let io = |source| ConvertError::io(folder, "write captured inputs to")(source);
        let widths: Vec<usize> = layers.iter().map(|layer| layer.hidden_size).collect();
        let capture = |_| -> io::Result<(Self, Arc<Mutex<Sink>>)> {
            let files = widths.iter().map(|_| tempfile::tempfile_in(folder));
            let files: Vec<File> = files.collect::<io::Result<_>>()?;
            let sink = Arc::new(Mutex::new(Sink::new(&files)?));
            let widths = widths.clone();
            Ok((Self { files, widths }, sink))
        };
        let captures = kinds.iter().map(capture).collect::<io::Result<Vec<_>>>();
        let captures = captures.map_err(io)?;
        for (kind, (_, sink)) in kinds.iter().zip(&captures) {
            let sink = sink.clone();
            let recorder = move |layer: usize, rows: &[f32]| lock(&sink).write(layer, rows);
            model.record_inputs(*kind, Some(Box::new(recorder)));
        }
        let ran = run(model);
        kinds
            .iter()
            .for_each(|kind| model.record_inputs(*kind, None));
        ran?;
        for (_, sink) in &captures {
            lock(sink).finish().map_err(io)?;
        }
        Ok(captures.into_iter().map(|(capture, _)| capture).collect())
    }

    /// The inputs of one layer for the tokens in `ranges`, `(tokens, hidden)`.
    pub(super) fn inputs(
        &self,
        layer: usize,
        ranges: &[Range<usize>],
    ) -> Result<Tensor, ConvertError> {
        let (width, tokens) = (self.widths[layer], count(ranges));
        let mut values = Vec::with_capacity(tokens * width);
        let mut read = || -> io::Result<()> {
            let mut reader = BufReader::new(&self.files[layer]);
            let mut row = vec![0; VALUE_BYTES * width];
            for range in ranges {
                reader.seek(SeekFrom::Start((range.start * row.len()) as u64))?;
                for _ in range.clone() {
                    reader.read_exact(&mut row)?;
                    let each = row.chunks_exact(VALUE_BYTES);
                    values.extend(
                        each.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes"))),
                    );
                }
            }
            Ok(())
        };
        read().map_err(ConvertError::io(Path::new("captured inputs"), "read"))?;
        let tensor = Tensor::from_vec(values, (tokens, width), &Device::Cpu);
        Ok(tensor.map_err(candle_wick_models::Error::from)?)
    }
}

/// Bytes of the files of one kind of input.
fn captured_bytes(layers: &[FfnLayer], tokens: usize) -> u64 {
    let row_bytes = layers
        .iter()
        .map(|layer| (VALUE_BYTES * layer.hidden_size) as u64);
    row_bytes.sum::<u64>().saturating_mul(tokens as u64)
}

fn check_room(
    folder: &Path,
    needed_bytes: u64,
    room_bytes: Option<u64>,
    tokens: usize,
) -> Result<(), ConvertError> {
    match room_bytes {
        Some(room) if room < needed_bytes => {
            let problem = format!(
                "has room for {room} bytes, and what the FFNs see on {tokens} tokens takes {needed_bytes}: make room or use \
                 fewer tokens"
            );
            Err(ConvertError::output(folder, problem))
        }
        _ => Ok(()),
    }
}

fn lock(sink: &Mutex<Sink>) -> std::sync::MutexGuard<'_, Sink> {
    sink.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Sink {
    fn new(files: &[File]) -> io::Result<Self> {
        let files = files
            .iter()
            .map(|file| file.try_clone().map(BufWriter::new));
        Ok(Self {
            files: files.collect::<io::Result<_>>()?,
            error: None,
        })
    }

    fn write(&mut self, layer: usize, rows: &[f32]) {
        if self.error.is_none() {
            let file = &mut self.files[layer];
            let written = rows
                .iter()
                .try_for_each(|value| file.write_all(&value.to_le_bytes()));
            self.error = written.err();
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        match self.error.take() {
            Some(error) => Err(error),
            None => self.files.iter_mut().try_for_each(Write::flush),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_as_they_were_written() -> Result<(), ConvertError> {
        let files = vec![tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let mut sink = Sink::new(&files).unwrap();
        let rows: Vec<f32> = (0..30).map(|value| value as f32 - 7.5).collect();
        sink.write(1, &rows[..12]);
        sink.write(1, &rows[12..]);
        sink.finish().unwrap();
        let widths = vec![2, 3];
        let capture = Capture { files, widths };
        let inputs = capture.inputs(1, &[1..2, 5..7])?.to_vec2::<f32>().unwrap();
        assert_eq!(inputs, [&rows[3..6], &rows[15..18], &rows[18..21]]);
        assert_eq!(capture.inputs(1, &[])?.dims(), [0, 3]);
        // Tokens that nobody wrote.
        assert!(capture.inputs(1, &[0..1, 9..11]).is_err());
        assert!(capture.inputs(0, &[0..0, 0..1]).is_err());
        Ok(())
    }

    #[test]
    fn a_folder_without_room_is_refused_with_both_numbers() {
        let check = |room| check_room(Path::new("a/model"), 1000, room, 50);
        check(Some(1000)).unwrap();
        // A system that does not say.
        check(None).unwrap();
        let error = check(Some(999)).unwrap_err().to_string();
        for part in ["a/model", "999", "1000", "50 tokens"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
