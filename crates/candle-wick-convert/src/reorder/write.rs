//! Writing the reordered folder: records in their new places, everything else as it is.
//!
//! Files are written one after the other, each whole or not at all, and noted in the state; the manifest comes last. What is
//! copied is compared with the hash that the manifest has of it, records with their checksums.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use candle_wick::{FlashFolder, MANIFEST_FILE, PREDICTORS_FILE};
use wick_format::{
    crc32c, ChecksumBlocks, FileEntry, FileLayout, Layout, Manifest, NeuronOrder, OrderOrigin,
    StoredDtype, TensorSpec,
};

use super::of_model;
use crate::convert::copy;
use crate::meter::Meter;
use crate::output::{OutputFile, OutputFolder};
use crate::state::{refuse_others, Found, State, STATE_FILE};
use crate::ConvertError;

/// What a tensor of a record file holds of which layer.
#[derive(Clone, Copy)]
enum Content {
    Records(usize),
    Checksums(usize),
    Order(usize),
    OrderChecksum(usize),
}

/// What is to be written; nothing is until [`write`](Self::write).
pub(super) struct Writer<'a> {
    source: &'a FlashFolder,
    out: &'a Path,
    job: String,
    /// The source's manifest, with the layers as they will be.
    manifest: Manifest,
    layouts: BTreeMap<String, FileLayout>,
    /// The file of predictors and its size, where there is one.
    predictors: Option<(PathBuf, u64)>,
}

impl<'a> Writer<'a> {
    /// Lays the files out, and refuses a folder `out` that holds something else.
    pub(super) fn new(
        source: &'a FlashFolder,
        out: &'a Path,
        job: String,
    ) -> Result<Self, ConvertError> {
        let mut manifest = source.manifest().clone();
        for layer in &mut manifest.layers {
            layer.layout = Layout::Permuted;
        }
        let mut layouts = BTreeMap::new();
        for layer in &manifest.layers {
            if !layouts.contains_key(&layer.file) {
                layouts.insert(layer.file.clone(), lay_out(&manifest, &layer.file)?);
            }
        }
        let own = source.path().join(PREDICTORS_FILE);
        let predictors = source.predictors_path().unwrap_or(&own).to_owned();
        let size = fs::metadata(&predictors).map(|found| found.len());
        let writer = Self {
            source,
            out,
            job,
            manifest,
            layouts,
            predictors: size.ok().map(|bytes| (predictors, bytes)),
        };
        writer.state()?;
        Ok(writer)
    }

    /// What an earlier run has left, or nothing.
    fn state(&self) -> Result<State, ConvertError> {
        let problem = match Found::look(self.out)? {
            Found::Nothing => {
                return Ok(State {
                    job: self.job.clone(),
                    finished: Vec::new(),
                });
            }
            Found::Unfinished(state) if state.job == self.job => {
                let names = self.manifest.files.iter().map(|file| file.name.as_str());
                let mut planned: BTreeSet<&str> = names.collect();
                planned.extend([MANIFEST_FILE, PREDICTORS_FILE]);
                refuse_others(self.out, &planned)?;
                return Ok(state);
            }
            Found::Unfinished(_) => {
                "holds the unfinished work of another command: remove it or choose another folder"
            }
            Found::Complete(_) => "already holds a converted folder: choose another one",
        };
        Err(ConvertError::output(self.out, problem))
    }

    /// Bytes to be written in all.
    pub(super) fn total_bytes(&self) -> u64 {
        let files = self.manifest.files.iter().map(|file| self.size_bytes(file));
        files.sum::<u64>() + self.predictors.as_ref().map_or(0, |(_, bytes)| *bytes)
    }

    fn size_bytes(&self, file: &FileEntry) -> u64 {
        let layout = self.layouts.get(&file.name);
        layout.map_or(file.size_bytes, FileLayout::total_bytes)
    }

    /// Writes the files that are missing, then the manifest; gives the bytes of all files.
    pub(super) fn write(
        self,
        orders: &[NeuronOrder],
        origin: OrderOrigin,
        meter: &Meter<'_>,
    ) -> Result<u64, ConvertError> {
        let output = OutputFolder::open(self.out)?;
        let written = self.write_files(&output, orders, meter);
        let files = written.inspect_err(|_| output.undo())?;
        let total_bytes = self.total_bytes();
        let mut manifest = self.manifest;
        manifest.model_hash = Manifest::hash_of_records(&manifest.layers, &files);
        manifest.files = files;
        manifest.order = Some(origin);
        let json = manifest.to_json();
        let readable = Manifest::parse(&json);
        assert!(
            readable.is_ok(),
            "a manifest that no reader accepts: {readable:?}"
        );
        output.write_file(MANIFEST_FILE, json.len() as u64, |file| {
            file.write(json.as_bytes())
        })?;
        output.remove_file(STATE_FILE)?;
        Ok(total_bytes)
    }

    /// Everything but the manifest; gives what the manifest lists.
    fn write_files(
        &self,
        output: &OutputFolder,
        orders: &[NeuronOrder],
        meter: &Meter<'_>,
    ) -> Result<Vec<FileEntry>, ConvertError> {
        // Looked at again, now that nobody else writes there.
        let mut state = self.state()?;
        let done: u64 = state.finished.iter().map(|file| file.size_bytes).sum();
        output.check_room(self.total_bytes().saturating_sub(done))?;
        state.write(output)?;
        let mut files = Vec::with_capacity(self.manifest.files.len());
        for file in &self.manifest.files {
            let name = &file.name;
            let layout = self.layouts.get(name);
            let on_written = |bytes| meter.add(bytes, name);
            let (state, size_bytes) = (&mut state, self.size_bytes(file));
            let entry = write_once(
                output,
                state,
                (name, size_bytes),
                meter,
                |out| match layout {
                    Some(layout) => self.records(layout, orders, out, &on_written),
                    None => copy(&self.path_of(name), size_bytes, out, &on_written),
                },
            )?;
            if layout.is_none() && entry != *file {
                output.remove_file(name)?;
                let problem = "is not what the manifest says: damaged, convert again";
                return Err(ConvertError::checkpoint(&self.path_of(name), problem));
            }
            files.push(entry);
        }
        if let Some((path, size_bytes)) = &self.predictors {
            let (file, size_bytes) = ((PREDICTORS_FILE, *size_bytes), *size_bytes);
            let on_written = |bytes| meter.add(bytes, PREDICTORS_FILE);
            write_once(output, &mut state, file, meter, |out| {
                copy(path, size_bytes, out, &on_written)
            })?;
        }
        Ok(files)
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.source.path().join(name)
    }

    /// Writes a record file.
    fn records(
        &self,
        layout: &FileLayout,
        orders: &[NeuronOrder],
        out: &mut OutputFile,
        on_written: &dyn Fn(u64),
    ) -> Result<(), ConvertError> {
        let contents = contents(&self.manifest);
        let mut checksums: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        out.write(layout.header_bytes())?;
        for (name, extent) in layout.entries() {
            let bytes = match contents.get(name) {
                Some(Content::Records(index)) => {
                    let of_layer = checksums.entry(*index).or_default();
                    let mut written = Ok(());
                    let neurons = orders[*index].neurons();
                    let read = self
                        .source
                        .for_each_record(*index, neurons, |record, crc32c| {
                            of_layer.extend_from_slice(&crc32c.to_le_bytes());
                            if written.is_ok() {
                                written = out.write(record);
                                on_written(record.len() as u64);
                            }
                        });
                    read.map_err(of_model)?;
                    written?;
                    continue;
                }
                Some(Content::Checksums(index)) => checksums.remove(index).unwrap_or_default(),
                Some(Content::Order(index)) => orders[*index].to_bytes(),
                Some(Content::OrderChecksum(index)) => {
                    crc32c(&orders[*index].to_bytes()).to_le_bytes().to_vec()
                }
                None => vec![0; extent.len_bytes as usize], // padding, below 4096 bytes
            };
            out.write(&bytes)?;
            on_written(bytes.len() as u64);
        }
        Ok(())
    }
}

/// Writes the file of this name and size and notes it, or confirms that an earlier run has.
fn write_once(
    output: &OutputFolder,
    state: &mut State,
    (name, size_bytes): (&str, u64),
    meter: &Meter<'_>,
    content: impl FnOnce(&mut OutputFile) -> Result<(), ConvertError>,
) -> Result<FileEntry, ConvertError> {
    let on_piece = |bytes| meter.add(bytes, name);
    if let Some(entry) = state.intact(output.path(), name, on_piece) {
        return Ok(entry);
    }
    let entry = output.write_file(name, size_bytes, content)?;
    state.finished.retain(|file| file.name != entry.name);
    state.finished.push(entry.clone());
    state.write(output)?;
    Ok(entry)
}

/// The tensors of all record files, by name.
fn contents(manifest: &Manifest) -> BTreeMap<String, Content> {
    let layers = manifest.layers.iter().enumerate();
    let contents = layers.flat_map(|(index, layer)| {
        let order = layer.order_tensor();
        [
            (layer.neurons_tensor(), Content::Records(index)),
            (layer.checksums_tensor(), Content::Checksums(index)),
            (
                ChecksumBlocks::tensor_name(&order),
                Content::OrderChecksum(index),
            ),
            (order, Content::Order(index)),
        ]
    });
    contents.collect()
}

/// The record file `name`: records first, then checksums, then orders.
fn lay_out(manifest: &Manifest, name: &str) -> Result<FileLayout, ConvertError> {
    let layers = || manifest.layers.iter().filter(|layer| layer.file == name);
    let mut specs = Vec::new();
    for layer in layers() {
        let shape = [layer.intermediate_size, layer.stride_bytes];
        let records = TensorSpec::new(layer.neurons_tensor(), StoredDtype::U8, &shape);
        specs.push(records);
    }
    let vector = |name, len| TensorSpec::new(name, StoredDtype::U32, &[len]);
    for layer in layers() {
        specs.push(vector(layer.checksums_tensor(), layer.intermediate_size));
    }
    for layer in layers() {
        let order = layer.order_tensor();
        let checksum = ChecksumBlocks::tensor_name(&order);
        specs.push(vector(order, layer.intermediate_size));
        specs.push(vector(checksum, 1));
    }
    FileLayout::new(&specs, &BTreeMap::new()).map_err(ConvertError::format(Path::new(name)))
}
