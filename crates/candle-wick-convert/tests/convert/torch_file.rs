//! A writer of PyTorch files, of both formats: what `torch.save` makes of a dictionary of tensors.

use std::collections::BTreeMap;
use std::io::{Cursor, Write};

use safetensors::Dtype as FileDtype;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::tiny::Stored;

/// A dictionary of tensors and the storages that they look into.
#[derive(Clone, Default)]
pub(crate) struct TorchFile {
    tensors: Vec<Entry>,
    pub(crate) storages: Vec<(FileDtype, Vec<u8>)>,
}

#[derive(Clone)]
struct Entry {
    name: String,
    storage: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

fn size_bytes(dtype: FileDtype) -> usize {
    match dtype {
        FileDtype::F64 | FileDtype::I64 => 8,
        FileDtype::F32 => 4,
        FileDtype::F16 | FileDtype::BF16 => 2,
        other => panic!("{other:?}"),
    }
}

impl TorchFile {
    /// A storage for each tensor, as it is.
    pub(crate) fn of(tensors: &BTreeMap<String, Stored>) -> Self {
        let mut this = Self::default();
        for (name, (dtype, shape, bytes)) in tensors {
            let mut strides = vec![1; shape.len()];
            for dim in (1..shape.len()).rev() {
                strides[dim - 1] = strides[dim] * shape[dim];
            }
            this.push(name, *dtype, bytes.clone(), shape, strides);
        }
        this
    }

    /// Matrices stored column by column; vectors with two strange elements after each of theirs.
    pub(crate) fn turned(tensors: &BTreeMap<String, Stored>) -> Self {
        let mut this = Self::default();
        for (name, (dtype, shape, bytes)) in tensors {
            let size = size_bytes(*dtype);
            let mut stored = Vec::new();
            if let [rows, columns] = **shape {
                for column in 0..columns {
                    let column =
                        (0..rows).map(|row| &bytes[(row * columns + column) * size..][..size]);
                    stored.extend(column.flatten());
                }
                this.push(name, *dtype, stored, shape, vec![1, rows]);
            } else {
                for element in bytes.chunks(size) {
                    stored.extend(element);
                    stored.extend(vec![0x3c; 2 * size]);
                }
                this.push(name, *dtype, stored, shape, vec![3]);
            }
        }
        this
    }

    fn push(
        &mut self,
        name: &str,
        dtype: FileDtype,
        bytes: Vec<u8>,
        shape: &[usize],
        strides: Vec<usize>,
    ) {
        self.tensors.push(Entry {
            name: name.into(),
            storage: self.storages.len(),
            shape: shape.into(),
            strides,
        });
        self.storages.push((dtype, bytes));
    }

    /// Another name for a tensor that is there.
    pub(crate) fn tie(&mut self, name: &str, other: &str) {
        let tied = self.tensors.iter().find(|entry| entry.name == other);
        let mut tied = tied.unwrap().clone();
        tied.name = name.into();
        self.tensors.push(tied);
    }

    /// Writes before every name what a training framework does.
    pub(crate) fn wrapped(mut self, prefix: &str) -> Self {
        for entry in &mut self.tensors {
            entry.name.insert_str(0, prefix);
        }
        self
    }

    /// As PyTorch 1.6 and later write it.
    pub(crate) fn zip(&self) -> Vec<u8> {
        self.zip_with(&self.pickle(false), &[])
    }

    /// The same with another pickle and without some entries.
    pub(crate) fn zip_with(&self, pickle: &[u8], missing: &[usize]) -> Vec<u8> {
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        let mut add = |name: String, content: &[u8]| {
            writer
                .start_file(format!("archive/{name}"), options)
                .unwrap();
            writer.write_all(content).unwrap();
        };
        add("data.pkl".into(), pickle);
        for (key, (_, bytes)) in self.storages.iter().enumerate() {
            if !missing.contains(&key) {
                add(format!("data/{key}"), bytes);
            }
        }
        add("version".into(), b"3\n");
        writer.finish().unwrap().into_inner()
    }

    /// As PyTorch before 1.6 wrote it: pickles of a magic number, a version, the system, the dictionary and the
    /// storages' keys; then each storage after its length.
    pub(crate) fn legacy(&self) -> Vec<u8> {
        let mut file = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.".to_vec();
        file.extend(b"\x80\x02M\xe9\x03.\x80\x02}X\x0d\0\0\0little_endian\x88s.");
        file.extend(self.pickle(true));
        file.extend(b"\x80\x02](");
        for key in 0..self.storages.len() {
            file.extend(text(&key.to_string()));
        }
        file.extend(b"e.");
        for (dtype, bytes) in &self.storages {
            file.extend(((bytes.len() / size_bytes(*dtype)) as u64).to_le_bytes());
            file.extend(bytes);
        }
        file
    }

    /// An ordered dictionary of `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`.
    pub(crate) fn pickle(&self, is_legacy: bool) -> Vec<u8> {
        let mut pickle = b"\x80\x02ccollections\nOrderedDict\n)R(".to_vec();
        for entry in &self.tensors {
            let (dtype, bytes) = &self.storages[entry.storage];
            let class = match dtype {
                FileDtype::F64 => "Double",
                FileDtype::F32 => "Float",
                FileDtype::F16 => "Half",
                FileDtype::BF16 => "BFloat16",
                FileDtype::I64 => "Long",
                other => panic!("{other:?}"),
            };
            pickle.extend(text(&entry.name));
            pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
            pickle.extend(text("storage"));
            pickle.extend(format!("ctorch\n{class}Storage\n").bytes());
            pickle.extend(text(&entry.storage.to_string()));
            pickle.extend(text("cpu"));
            pickle.extend(int(bytes.len() / size_bytes(*dtype)));
            if is_legacy {
                pickle.push(b'N');
            }
            pickle.extend(b"tQ");
            pickle.extend(int(0));
            for numbers in [&entry.shape, &entry.strides] {
                pickle.push(b'(');
                pickle.extend(numbers.iter().flat_map(|&number| int(number)));
                pickle.push(b't');
            }
            pickle.extend(b"\x89ccollections\nOrderedDict\n)RtR");
        }
        pickle.extend(b"u.");
        pickle
    }
}

fn text(text: &str) -> Vec<u8> {
    [
        b"X",
        &(text.len() as u32).to_le_bytes()[..],
        text.as_bytes(),
    ]
    .concat()
}

fn int(number: usize) -> Vec<u8> {
    [b"J", &(number as i32).to_le_bytes()[..]].concat()
}
