//! Checkpoints in, converted folder out.
//!
//! [`convert`] reads a Hugging Face folder (safetensors or PyTorch files) or a GGUF file and writes
//! the folder that `wick-format` describes. It streams: its memory does not grow with the model.
//!
//! [`synthetic::synthesise`] writes such a folder with random weights, from no checkpoint at all.
//!
//! [`reorder::reorder`] writes a folder again, with neurons that are read together side by side.
//!
//! [`lora::apply`] merges an adapter into a checkpoint before all that.
//!
//! A model of the Hugging Face hub is brought into such a folder by [`hub::download`].
//!
//! The steps, each in its own file:
//! 1. `source` and `config` read and check the checkpoint; `gguf` brings GGUF to Hugging Face's names.
//! 2. `family` says which tensors a model of this type has; `check` and `head` match the two.
//! 3. `tokenizer` makes a `tokenizer.json` where the checkpoint has another kind; `plan` lays out every output file.
//! 4. `tensors` and `records` write them through `output`, one after the other; `state` remembers
//!    the finished ones, so that a killed run can be taken up. The manifest comes last.
//!
//! Invariants:
//! - the source is only read; nothing in the output folder is deleted that this crate did not
//!   write;
//! - a file under its final name is complete and on the disk; a folder with a manifest is complete;
//! - the same source and options give the same bytes, whatever was interrupted before.
#![forbid(unsafe_code)]

mod check;
mod config;
mod convert;
mod error;
mod family;
mod gguf;
mod head;
#[cfg(feature = "hub")]
pub mod hub;
pub mod lora;
mod meter;
mod options;
mod output;
mod plan;
pub mod predictor;
mod records;
pub mod reorder;
mod source;
mod state;
pub mod synthetic;
mod tensors;
mod tokenizer;
mod transcode;

pub use convert::convert;
pub use error::ConvertError;
pub use family::supported_families;
pub use options::{ConvertOptions, ConvertProgress, ConvertReport};
pub use wick_format::Layout;
