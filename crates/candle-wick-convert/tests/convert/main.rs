//! The conversion from outside: checkpoints made here (and the shared fixtures, when present) in,
//! folders out, read back with the safetensors crate.

mod content;
mod corrupt;
mod falcon;
mod folder;
mod heads;
mod persimmon;
mod phi;
mod resume;
mod tiny;
