//! Recording a trace: tokens come in one by one, the file appears at the end, whole or not at all.
//!
//! Ids go to a temporary file a layer beside the result, so that memory does not grow with the text but for an offset
//! a token. The result is written beside its place under a name of this process's own, flushed to the disk, then renamed. It
//! replaces an earlier trace and nothing else.
//!
//! Not here: the form of the file (`recorded_trace`), running a model.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use wick_format::FileLayout;

use crate::error::{Error, Result};
use crate::recorded_trace::{Part, RecordedTrace, TraceMetadata};

/// A trace on its way into a file.
pub struct TraceRecorder {
    path: PathBuf,
    metadata: TraceMetadata,
    layers: Vec<LayerSpool>,
    /// What went wrong first: who records a running model cannot return it.
    error: Option<Error>,
}

/// One layer so far.
struct LayerSpool {
    counts: Vec<u32>,
    offsets: Vec<u32>,
    neurons: BufWriter<File>,
}

impl TraceRecorder {
    /// A trace without tokens, of layers with `intermediate_sizes` neurons, that is to be the file `path`.
    ///
    /// # Errors
    /// The folder of `path` cannot be written to, or `path` is something else than a trace.
    pub fn create(
        path: impl AsRef<Path>,
        metadata: TraceMetadata,
        intermediate_sizes: impl IntoIterator<Item = usize>,
    ) -> Result<Self> {
        let path = path.as_ref().to_owned();
        check_place(&path)?;
        let spool = |width: usize| {
            Ok(LayerSpool {
                counts: vec![0; width],
                offsets: vec![0],
                neurons: BufWriter::new(tempfile::tempfile_in(folder_of(&path))?),
            })
        };
        let layers: io::Result<Vec<_>> = intermediate_sizes.into_iter().map(spool).collect();
        Ok(Self {
            layers: layers.map_err(|source| opened(&path, source))?,
            path,
            metadata,
            error: None,
        })
    }

    /// Appends a token to layer `layer`, with these neurons, ascending. What goes wrong is told by [`Self::finish`].
    ///
    /// # Panics
    /// There is no such layer or no such neuron.
    pub fn push(&mut self, layer: usize, neurons: &[u32]) {
        if self.error.is_none() {
            let path = &self.path;
            self.error = self.layers[layer].push(neurons, layer, path).err();
        }
    }

    /// Writes the file; gives its size.
    ///
    /// # Errors
    /// The disk is full or refuses, or layers have got different numbers of tokens.
    pub fn finish(mut self) -> Result<u64> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let tokens: Vec<usize> = self
            .layers
            .iter()
            .map(|layer| layer.offsets.len())
            .collect();
        if tokens.iter().any(|count| *count != tokens[0]) {
            let reason = "layers have different numbers of tokens".to_owned();
            return Err(refused(&self.path, reason));
        }
        let specs = self
            .layers
            .iter()
            .enumerate()
            .flat_map(|(index, layer)| Part::ALL.map(|part| part.spec(index, layer.len(part))));
        let specs: Vec<_> = specs.collect();
        let layout =
            FileLayout::new(&specs, &self.metadata.to_map()).map_err(|source| Error::Format {
                path: self.path.clone(),
                source,
            })?;
        let partial = partial_path(&self.path);
        let written = self.write(&layout, &partial);
        if written.is_err() {
            let _gone = fs::remove_file(&partial); // a leftover is harmless: written anew next time
        }
        written.map_err(|source| opened(&self.path, source))?;
        Ok(layout.total_bytes())
    }

    fn write(&mut self, layout: &FileLayout, partial: &Path) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(partial)?);
        file.write_all(layout.header_bytes())?;
        // Vectors follow each other without padding.
        for layer in &mut self.layers {
            for part in Part::ALL {
                layer.copy(part, &mut file)?;
            }
        }
        file.into_inner()?.sync_all()?;
        fs::rename(partial, &self.path)?;
        File::open(folder_of(&self.path))?.sync_all()
    }
}

impl LayerSpool {
    fn push(&mut self, neurons: &[u32], layer: usize, path: &Path) -> Result<()> {
        let start = *self.offsets.last().expect("there is a first offset");
        let end = u32::try_from(start as usize + neurons.len()).map_err(|_| {
            refused(
                path,
                format!(
                    "layer {layer} has 2^32 neurons or more over all tokens: record fewer tokens"
                ),
            )
        })?;
        for &neuron in neurons {
            self.counts[neuron as usize] += 1;
            let written = self.neurons.write_all(&neuron.to_le_bytes());
            written.map_err(|source| opened(path, source))?;
        }
        self.offsets.push(end);
        Ok(())
    }

    fn len(&self, part: Part) -> usize {
        match part {
            Part::Counts => self.counts.len(),
            Part::Offsets => self.offsets.len(),
            Part::Neurons => self.offsets[self.offsets.len() - 1] as usize,
        }
    }

    fn copy(&mut self, part: Part, to: &mut impl Write) -> io::Result<()> {
        let values = match part {
            Part::Counts => &self.counts,
            Part::Offsets => &self.offsets,
            Part::Neurons => {
                self.neurons.flush()?;
                let mut spooled = self.neurons.get_ref();
                spooled.rewind()?;
                return io::copy(&mut BufReader::new(spooled), to).map(|_| ());
            }
        };
        values
            .iter()
            .try_for_each(|value| to.write_all(&value.to_le_bytes()))
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Of this recorder alone: two that record into one folder do not write into each other's file.
fn partial_path(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    path.with_file_name(format!(".wick-trace-{process}-{number}.partial"))
}

/// Refuses what must not be replaced, before hours of work: a model's file, a text, a folder, a device.
fn check_place(path: &Path) -> Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(|source| opened(path, source))?,
    };
    // An empty file is somebody's way to keep a name.
    if metadata.is_file() && (metadata.len() == 0 || RecordedTrace::open(path).is_ok()) {
        return Ok(());
    }
    let reason = "there is something else than a trace in this place: give another name";
    Err(refused(path, reason.to_owned()))
}

fn opened(path: &Path, source: io::Error) -> Error {
    Error::Open {
        path: path.to_owned(),
        source,
    }
}

fn refused(path: &Path, reason: String) -> Error {
    Error::Trace {
        path: path.to_owned(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorded_trace::RecordedTrace;

    fn metadata() -> TraceMetadata {
        TraceMetadata {
            model_type: "opt".to_owned(),
            model_hash: "0123456789abcdef".to_owned(),
            selector: "oracle".to_owned(),
            is_replayed: false,
            sequence_tokens: 512,
        }
    }

    #[test]
    fn what_is_recorded_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.trace");
        let mut recorder = TraceRecorder::create(&path, metadata(), [5, 3]).unwrap();
        let tokens: [[&[u32]; 2]; 3] = [[&[0, 4], &[]], [&[], &[1]], [&[1, 2, 4], &[0, 1, 2]]];
        for layers in tokens {
            for (layer, neurons) in layers.into_iter().enumerate() {
                recorder.push(layer, neurons);
            }
        }
        // Nothing under its name before the end.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let bytes = recorder.finish().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let trace = RecordedTrace::open(&path).unwrap();
        assert_eq!(trace.metadata(), &metadata());
        assert_eq!(
            (trace.intermediate_sizes(), trace.tokens()),
            (&[5, 3][..], 3)
        );
        for layer in 0..2 {
            let read = trace.layer(layer).unwrap();
            let expected: Vec<&[u32]> = tokens.iter().map(|layers| layers[layer]).collect();
            assert_eq!(read.iter().collect::<Vec<_>>(), expected);
            assert_eq!((read.tokens(), read.neurons(2)), (3, expected[2]));
        }
        let first = trace.layer(0).unwrap();
        assert_eq!((first.intermediate_size(), first.entries()), (5, 5));
        assert_eq!(first.counts(), [1, 1, 1, 0, 2]);
    }

    #[test]
    fn traces_of_one_folder_may_be_recorded_at_once() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let folder = folder.path();
                scope.spawn(move || {
                    for number in 0..20u32 {
                        let path = folder.join(format!("{thread}-{number}.trace"));
                        let mut recorder = TraceRecorder::create(&path, metadata(), [200]).unwrap();
                        recorder.push(0, &[thread, 100 + number]);
                        recorder.finish().unwrap();
                        let layer = RecordedTrace::open(&path).unwrap().layer(0).unwrap();
                        assert_eq!(layer.neurons(0), [thread, 100 + number]);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 160);
    }

    #[test]
    fn a_failure_leaves_nothing_and_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.trace");
        let mut uneven = TraceRecorder::create(&path, metadata(), [5, 3]).unwrap();
        uneven.push(0, &[1]);
        let error = uneven.finish().unwrap_err().to_string();
        assert!(
            error.contains("a.trace") && error.contains("different numbers"),
            "{error}"
        );
        let nowhere = folder.path().join("no/such/a.trace");
        let error = TraceRecorder::create(&nowhere, metadata(), [5])
            .err()
            .unwrap();
        assert!(error.to_string().contains("no/such/a.trace"), "{error}");
        // A folder stands where the file should go: from the start, and since then.
        let recorder = TraceRecorder::create(&path, metadata(), [5]).unwrap();
        fs::create_dir_all(path.join("x")).unwrap();
        let early = TraceRecorder::create(&path, metadata(), [5]).err().unwrap();
        assert!(early.to_string().contains("something else"), "{early}");
        let late = recorder.finish().unwrap_err().to_string();
        assert!(late.contains("a.trace"), "{late}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
