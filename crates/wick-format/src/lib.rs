#![doc = include_str!("../../../docs/FORMAT.md")]
#![forbid(unsafe_code)]

mod checksum;
mod column;
mod dtype;
mod error;
mod hash;
mod header;
mod index;
mod layer;
mod layout;
mod manifest;
mod order;
mod predictor_part;
mod record;

pub use checksum::ChecksumBlocks;
pub use column::ColumnLayout;
pub use dtype::{u32_values, Dtype, StoredDtype};
pub use error::FormatError;
pub use hash::{crc32c, FileHasher};
pub use header::{header_len_bytes, RawHeader, RawTensor, HEADER_LEN_MAX};
pub use index::{TensorExtent, TensorIndex, ALIGNMENT_BYTES};
pub use layer::{ColumnKind, ColumnStrides, FfnLayer, Layout};
pub use layout::{FileLayout, TensorSpec};
pub use manifest::{
    is_plain_file_name, FileEntry, Manifest, OrderOrigin, FORMAT_VERSION, MANIFEST_FILE,
    PREDICTORS_FILE, RESIDENT_FILE,
};
pub use order::NeuronOrder;
pub use predictor_part::PredictorPart;
pub use record::{RecordLayout, SIZE_MAX, STRIDE_UNIT_BYTES};
