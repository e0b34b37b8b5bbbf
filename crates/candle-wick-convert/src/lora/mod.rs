//! A LoRA adapter merged into the checkpoint that it was trained on: `W + scaling * B A`, a new checkpoint.
//!
//! The new folder has the checkpoint's config and tokenizer, and all weights in one `model.safetensors`, each in the dtype that it is
//! stored in; sums are f32, rounded once. Tensors are streamed, some rows at a time. The weights come last: a folder without them is no
//! checkpoint.
//!
//! Not here: training adapters, and what an adapter may be (`adapter`).

mod adapter;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use wick_format::{Dtype, FileLayout, StoredDtype, TensorSpec};

use self::adapter::{Adapter, Pair};
use crate::config::CONFIG_FILE;
use crate::convert::copies;
use crate::meter::Meter;
use crate::output::{read_pieces, refuse_inside, OutputFile, OutputFolder};
use crate::source::{file_name, read_text, Shards, SourceFolder, SourceTensor};
use crate::transcode::narrow;
use crate::{ConvertError, ConvertProgress};

const WEIGHTS_FILE: &str = "model.safetensors";
/// Elements of the rows that are merged at once.
const BLOCK_ELEMENTS: usize = 1 << 20;

/// What was merged.
#[derive(Clone, Debug)]
pub struct LoraReport {
    /// Matrices that the adapter changes.
    pub merged: usize,
    /// Tensors written.
    pub tensors: usize,
    /// Tensors of the checkpoint that are no weights (masks, positions), which were left out.
    pub left_out: Vec<String>,
    /// Size of the weights.
    pub weight_bytes: u64,
}

/// Merges the adapter in the folder `adapter`, in the form of Hugging Face's peft, into the checkpoint in the folder `model`, and
/// writes the result to the folder `out`, which must not exist or be empty.
///
/// # Errors
/// The checkpoint is damaged or quantised; the adapter is damaged, no plain LoRA, or one of another model; a merged weight does not fit
/// its dtype; `out` holds something or cannot be written. `out` has no weights then.
pub fn apply(
    model: &Path,
    adapter: &Path,
    out: &Path,
    progress: &dyn Fn(ConvertProgress<'_>),
) -> Result<LoraReport, ConvertError> {
    let found = Shards::find(model)?;
    let folder = found.source_folder().filter(|_| !found.is_gguf());
    let Some(folder) = folder else {
        let problem = "is no Hugging Face folder, and adapters are merged into those";
        return Err(ConvertError::checkpoint(model, problem));
    };
    let source = SourceFolder::open(&found, str::to_owned)?;
    let adapter = Adapter::open(adapter, &source)?;
    let mut copied = vec![folder.join(CONFIG_FILE)];
    refuse_quantised(&copied[0])?;
    copied.extend(copies(folder)?.into_iter().map(|(path, _)| path));
    refuse_inside(model, out)?;
    refuse_used(out)?;
    let merge = Merge::plan(source, adapter)?;
    let output = OutputFolder::open(out)?;
    let meter = Meter::new(progress, merge.layout.total_bytes());
    merge.write(&copied, &output, &meter).inspect_err(|_| {
        // The folder was empty: what is in it is of this run, and in the way of the next one.
        for path in &copied {
            let _may_stay = output.remove_file(&file_name(path));
        }
        output.undo();
    })
}

/// Refuses the checkpoint of this config when its weights are stored with scales beside them.
fn refuse_quantised(config: &Path) -> Result<(), ConvertError> {
    let problem = match serde_json::from_str::<serde_json::Value>(&read_text(config)?) {
        Err(error) => format!("is no JSON: {error}"),
        Ok(json)
            if json
                .get("quantization_config")
                .is_some_and(|value| !value.is_null()) =>
        {
            "has a quantization_config, and adapters are merged into plain weights".to_owned()
        }
        Ok(_) => return Ok(()),
    };
    Err(ConvertError::checkpoint(config, problem))
}

/// Refuses a folder that has something in it.
fn refuse_used(out: &Path) -> Result<(), ConvertError> {
    let mut entries = match std::fs::read_dir(out) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(ConvertError::io(out, "read")(error)),
    };
    match entries.next() {
        Some(_) => Err(ConvertError::output(
            out,
            "is not empty: choose another one",
        )),
        None => Ok(()),
    }
}

struct Merge {
    source: SourceFolder,
    adapter: Adapter,
    layout: FileLayout,
    left_out: Vec<String>,
}

impl Merge {
    fn plan(source: SourceFolder, adapter: Adapter) -> Result<Self, ConvertError> {
        let (mut specs, mut left_out) = (Vec::new(), Vec::new());
        for name in source.names() {
            let tensor = source.get(name).expect("it is one of its names");
            match source.dtype(tensor) {
                Ok(_) if tensor.is_quantised() => {
                    return Err(source.wrong(
                        tensor,
                        "quantised",
                        "F32, F16 or BF16 to merge into",
                    ));
                }
                Ok(dtype) => specs.push(TensorSpec::new(
                    name,
                    StoredDtype::from(dtype),
                    &tensor.shape,
                )),
                Err(what) if name.ends_with(".weight") => return Err(what),
                Err(_) => left_out.push(name.to_owned()),
            }
        }
        // What transformers asks of a file.
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let layout = FileLayout::packed(&specs, &metadata)
            .map_err(ConvertError::format(Path::new(WEIGHTS_FILE)))?;
        Ok(Self {
            source,
            adapter,
            layout,
            left_out,
        })
    }

    fn write(
        self,
        copied: &[PathBuf],
        output: &OutputFolder,
        meter: &Meter<'_>,
    ) -> Result<LoraReport, ConvertError> {
        let weight_bytes = self.layout.total_bytes();
        output.check_room(weight_bytes)?;
        for path in copied {
            let size_bytes = std::fs::metadata(path)
                .map_err(ConvertError::io(path, "read"))?
                .len();
            output.write_file(&file_name(path), size_bytes, |file| {
                read_pieces(path, |piece| file.write(piece))
            })?;
        }
        output.write_file(WEIGHTS_FILE, weight_bytes, |file| {
            file.write(self.layout.header_bytes())?;
            for (name, _) in self.layout.entries() {
                self.write_tensor(name, file, meter)?;
            }
            Ok(())
        })?;
        Ok(LoraReport {
            merged: self.adapter.pairs.len(),
            tensors: self.layout.entries().len(),
            left_out: self.left_out,
            weight_bytes,
        })
    }

    /// Streams a tensor, with what the adapter adds to it.
    fn write_tensor(
        &self,
        name: &str,
        file: &mut OutputFile,
        meter: &Meter<'_>,
    ) -> Result<(), ConvertError> {
        let tensor = self.source.get(name).expect("it was planned");
        let dtype = self.source.dtype(tensor)?;
        let width = tensor.width();
        let block_rows = (BLOCK_ELEMENTS / width.max(1)).max(1);
        let pair = self.adapter.pairs.get(name);
        let factors = pair.map(|pair| self.adapter.read(pair)).transpose()?;
        let mut target = Vec::new();
        for first in (0..tensor.rows()).step_by(block_rows) {
            let rows = first..tensor.rows().min(first + block_rows);
            target.resize(rows.len() * width * dtype.size_bytes(), 0);
            match (pair, &factors) {
                (Some(pair), Some([a, b])) => {
                    let sums = self.sums(tensor, rows.clone(), pair, a, b)?;
                    let too_large = |value: f32| {
                        let got = format!("{value} once the adapter is added");
                        self.source
                            .wrong(tensor, got, format!("values that fit {dtype}"))
                    };
                    if let Some(value) = sums.iter().find(|value| !value.is_finite()) {
                        return Err(too_large(*value));
                    }
                    narrow(dtype, &sums, &mut target).map_err(too_large)?;
                }
                _ => {
                    let columns = 0..width;
                    self.source
                        .read(tensor, rows.clone(), columns, dtype, &mut target)?;
                }
            }
            file.write(&target)?;
            meter.add(target.len() as u64, name);
            self.source.release(tensor, rows);
        }
        Ok(())
    }

    /// The rows `rows` of `W + scaling * B A` in f32.
    fn sums(
        &self,
        tensor: &SourceTensor,
        rows: Range<usize>,
        pair: &Pair,
        a: &[f32],
        b: &[f32],
    ) -> Result<Vec<f32>, ConvertError> {
        let width = tensor.width();
        let mut sums = read_f32(&self.source, tensor, rows.clone())?;
        for (row, sums) in rows.zip(sums.chunks_mut(width.max(1))) {
            for (b, a) in b[row * pair.rank..][..pair.rank]
                .iter()
                .zip(a.chunks(width))
            {
                let factor = self.adapter.scaling * b;
                sums.iter_mut()
                    .zip(a)
                    .for_each(|(sum, a)| *sum += factor * a);
            }
        }
        Ok(sums)
    }
}

/// Rows of a tensor as f32.
fn read_f32(
    source: &SourceFolder,
    tensor: &SourceTensor,
    rows: Range<usize>,
) -> Result<Vec<f32>, ConvertError> {
    let width = tensor.width();
    let mut bytes = vec![0; rows.len() * width * 4];
    source.read(tensor, rows, 0..width, Dtype::F32, &mut bytes)?;
    let values = bytes.as_chunks::<4>().0.iter();
    Ok(values.map(|value| f32::from_le_bytes(*value)).collect())
}
