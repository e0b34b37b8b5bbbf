//! The conversion from outside: checkpoints made here and the repository's fixtures in,
//! folders out, read back with the safetensors crate.

mod columns;
mod content;
mod corrupt;
mod falcon;
mod folder;
mod gguf;
mod gguf_families;
mod gguf_file;
mod gguf_metadata;
mod heads;
mod persimmon;
mod phi;
mod resume;
mod tiny;
mod torch;
mod torch_file;
