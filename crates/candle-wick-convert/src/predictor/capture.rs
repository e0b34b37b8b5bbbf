//! The inputs of every FFN on a text, one temporary file a layer: one layer's inputs are in memory at a time.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle::{Device, Tensor};
use candle_wick::PredictorInput;
use candle_wick_models::LoadedModel;

use crate::ConvertError;

/// Files with f32 rows of one layer's inputs each, removed when dropped.
pub(super) struct Capture {
    files: Vec<File>,
    tokens: usize,
}

/// What the recorder writes to; it cannot return an error, so the first one waits here.
struct Sink {
    files: Vec<BufWriter<File>>,
    error: Option<io::Error>,
}

impl Capture {
    /// Runs the model over `ids` in blocks of its context and keeps each layer's inputs of `kind`, in files in `folder`.
    pub(super) fn record(
        model: &mut LoadedModel,
        folder: &Path,
        ids: &[u32],
        kind: PredictorInput,
        progress: &dyn Fn(usize),
    ) -> Result<Self, ConvertError> {
        let over = |model: &mut LoadedModel| run(model, ids, progress);
        Self::of_kind(model, folder, (kind, ids.len()), over)
    }

    /// What each FFN sees while `run` takes the model over `tokens` tokens.
    pub(super) fn around(
        model: &mut LoadedModel,
        folder: &Path,
        tokens: usize,
        run: impl FnOnce(&mut LoadedModel) -> Result<(), ConvertError>,
    ) -> Result<Self, ConvertError> {
        Self::of_kind(model, folder, (PredictorInput::FfnInput, tokens), run)
    }

    fn of_kind(
        model: &mut LoadedModel,
        folder: &Path,
        (kind, tokens): (PredictorInput, usize),
        run: impl FnOnce(&mut LoadedModel) -> Result<(), ConvertError>,
    ) -> Result<Self, ConvertError> {
        let io = |source| ConvertError::io(folder, "write captured inputs to")(source);
        let layers = model.folder().manifest().layers.len();
        let files: io::Result<Vec<File>> =
            (0..layers).map(|_| tempfile::tempfile_in(folder)).collect();
        let files = files.map_err(io)?;
        let sinks: io::Result<Vec<File>> = files.iter().map(File::try_clone).collect();
        let files_to_write = sinks.map_err(io)?.into_iter().map(BufWriter::new).collect();
        let sink = Arc::new(Mutex::new(Sink {
            files: files_to_write,
            error: None,
        }));
        let recorder = {
            let sink = sink.clone();
            Box::new(move |layer: usize, rows: &[f32]| lock(&sink).write(layer, rows))
        };
        model.record_inputs(kind, Some(recorder));
        let ran = run(model);
        model.record_inputs(kind, None);
        ran?;
        lock(&sink).finish().map_err(io)?;
        Ok(Self { files, tokens })
    }

    /// The inputs of one layer, `(tokens, hidden)`.
    pub(super) fn inputs(&self, layer: usize, hidden: usize) -> Result<Tensor, ConvertError> {
        use std::io::Seek;
        let mut reader = BufReader::new(&self.files[layer]);
        let mut values = vec![0.0; self.tokens * hidden];
        let mut row = vec![0; 4 * hidden];
        let io = ConvertError::io(Path::new("captured inputs"), "read");
        let read = reader.rewind().and_then(|()| {
            for values in values.chunks_mut(hidden.max(1)) {
                reader.read_exact(&mut row)?;
                for (value, bytes) in values.iter_mut().zip(row.chunks_exact(4)) {
                    *value = f32::from_le_bytes(bytes.try_into().expect("4 bytes"));
                }
            }
            Ok(())
        });
        read.map_err(io)?;
        Ok(
            Tensor::from_vec(values, (self.tokens, hidden), &Device::Cpu)
                .map_err(candle_wick_models::Error::from)?,
        )
    }
}

fn run(model: &mut LoadedModel, ids: &[u32], progress: &dyn Fn(usize)) -> Result<(), ConvertError> {
    for block in ids.chunks(model.ctx()) {
        model.reset();
        model.forward(block)?;
        progress(block.len());
    }
    Ok(())
}

fn lock(sink: &Mutex<Sink>) -> std::sync::MutexGuard<'_, Sink> {
    sink.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Sink {
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
