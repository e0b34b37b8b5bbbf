//! Writers of small files, and the invariants that every reader keeps.

use std::io::{Cursor, Write};

use wick_checkpoint::StoredTensor;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// Asserts that everything a tensor can address lies in its extent, and that in the file.
#[track_caller]
pub(crate) fn assert_sound(tensors: &[StoredTensor], file_len: usize) {
    for tensor in tensors {
        let end = tensor.offset_bytes.checked_add(tensor.len_bytes);
        let end = end.expect("an extent beyond 64 bits");
        assert!(end <= file_len as u64, "{tensor:?} in {file_len} bytes");
        assert_eq!(tensor.shape.len(), tensor.strides.len(), "{tensor:?}");
        let count = tensor
            .shape
            .iter()
            .try_fold(1u64, |count, &dim| count.checked_mul(dim as u64));
        if tensor.shape.contains(&0) {
            continue;
        }
        assert!(count.unwrap() <= 8 * file_len as u64, "{tensor:?}");
        if let Some(size) = size_bytes(&tensor.dtype) {
            let dims = tensor.shape.iter().zip(&tensor.strides);
            let last: u64 = dims
                .map(|(&dim, &stride)| (dim as u64 - 1) * stride as u64)
                .sum();
            assert_eq!((last + 1) * size, tensor.len_bytes, "{tensor:?}");
        }
    }
}

/// Bytes of an element, of the dtypes that have no blocks.
pub(crate) fn size_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F64" | "I64" | "U64" | "C64" => 8,
        "F32" | "I32" | "U32" => 4,
        "F16" | "BF16" | "I16" | "U16" => 2,
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" => 1,
        "C128" => 16,
        _ => return None,
    })
}

/// A pickle, opcode by opcode.
#[derive(Clone)]
pub(crate) struct Pickle(pub(crate) Vec<u8>);

impl Pickle {
    pub(crate) fn new() -> Self {
        Self(vec![0x80, 2])
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub(crate) fn global(self, module: &str, name: &str) -> Self {
        self.raw(format!("c{module}\n{name}\n").as_bytes())
    }

    pub(crate) fn text(self, text: &str) -> Self {
        let len = text.len() as u32;
        self.raw(b"X").raw(&len.to_le_bytes()).raw(text.as_bytes())
    }

    pub(crate) fn int(self, number: i64) -> Self {
        self.raw(&[0x8a, 8]).raw(&number.to_le_bytes())
    }

    pub(crate) fn ints(self, numbers: &[i64]) -> Self {
        let opened = self.raw(b"(");
        numbers
            .iter()
            .fold(opened, |pickle, &number| pickle.int(number))
            .raw(b"t")
    }

    /// The persistent id of a storage, resolved.
    pub(crate) fn storage(self, class: &str, key: &str, count: i64) -> Self {
        let pickle = self.raw(b"(").text("storage").global("torch", class);
        pickle.text(key).text("cpu").int(count).raw(b"tQ")
    }

    /// A tensor of a storage of `count` numbers.
    pub(crate) fn tensor(
        self,
        key: &str,
        count: i64,
        offset: i64,
        shape: &[i64],
        strides: &[i64],
    ) -> Self {
        self.global("torch._utils", "_rebuild_tensor_v2")
            .raw(b"(")
            .storage("FloatStorage", key, count)
            .view(offset, shape, strides)
    }

    /// The arguments of a tensor after its storage, and the call.
    pub(crate) fn view(self, offset: i64, shape: &[i64], strides: &[i64]) -> Self {
        let pickle = self.int(offset).ints(shape).ints(strides).raw(b"\x89");
        pickle.global("collections", "OrderedDict").raw(b")RtR")
    }

    /// The only value of a dictionary, under `name`.
    pub(crate) fn in_dict(name: &str, value: impl FnOnce(Self) -> Self) -> Vec<u8> {
        value(Self::new().raw(b"}").text(name)).raw(b"s.").0
    }
}

/// A zip archive as PyTorch writes it, of entries by their names without the root.
pub(crate) fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, content) in entries {
        writer
            .start_file(format!("archive/{name}"), options)
            .unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

/// An archive of one pickle and one storage `0` of 24 bytes.
pub(crate) fn archive_of(pickle: &[u8]) -> Vec<u8> {
    archive(&[("data.pkl", pickle), ("data/0", &[1; 24])])
}

/// A file of the format before archives: the object, the keys, the storages.
pub(crate) fn legacy(object: &[u8], keys: &[&str], storages: &[(i64, &[u8])]) -> Vec<u8> {
    let mut file = legacy_head(1001, true);
    file.extend(object);
    let keys = keys
        .iter()
        .fold(Pickle::new().raw(b"]("), |pickle, key| pickle.text(key));
    file.extend(keys.raw(b"e.").0);
    for (count, bytes) in storages {
        file.extend(count.to_le_bytes());
        file.extend(*bytes);
    }
    file
}

/// The three pickles that such a file starts with.
pub(crate) fn legacy_head(version: i64, little_endian: bool) -> Vec<u8> {
    let magic = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";
    let flag: &[u8] = if little_endian { b"\x88s." } else { b"\x89s." };
    [
        Pickle::new().raw(magic).0,
        Pickle::new().int(version).raw(b".").0,
        Pickle::new().raw(b"}").text("little_endian").raw(flag).0,
    ]
    .concat()
}

/// A GGUF file: counts, metadata and tensors as given, then `data_len` bytes of data at 32.
#[derive(Clone)]
pub(crate) struct Gguf {
    pub(crate) version: u32,
    /// Key, type, value.
    pub(crate) metadata: Vec<(String, u32, Vec<u8>)>,
    /// Name, dims innermost first, type, offset.
    pub(crate) tensors: Vec<(String, Vec<u64>, u32, u64)>,
    pub(crate) data_len: usize,
}

/// A string as GGUF writes it.
pub(crate) fn gguf_string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// An array as GGUF writes it, of items that are written already.
pub(crate) fn gguf_array(number: u32, count: u64, items: &[u8]) -> Vec<u8> {
    [&number.to_le_bytes()[..], &count.to_le_bytes(), items].concat()
}

impl Gguf {
    pub(crate) fn new() -> Self {
        Self {
            version: 3,
            metadata: Vec::new(),
            tensors: Vec::new(),
            data_len: 0,
        }
    }

    pub(crate) fn with(mut self, key: &str, number: u32, value: &[u8]) -> Self {
        self.metadata.push((key.into(), number, value.to_vec()));
        self
    }

    pub(crate) fn tensor(mut self, name: &str, dims: &[u64], number: u32, offset: u64) -> Self {
        self.tensors
            .push((name.into(), dims.to_vec(), number, offset));
        self
    }

    pub(crate) fn data(mut self, len: usize) -> Self {
        self.data_len = len;
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, number, value) in &self.metadata {
            bytes.extend(gguf_string(key));
            bytes.extend(number.to_le_bytes());
            bytes.extend(value);
        }
        for (name, dims, number, offset) in &self.tensors {
            bytes.extend(gguf_string(name));
            bytes.extend((dims.len() as u32).to_le_bytes());
            bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            bytes.extend(number.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        let data_start = bytes.len().next_multiple_of(32);
        bytes.resize(data_start + self.data_len, 0);
        bytes
    }
}
