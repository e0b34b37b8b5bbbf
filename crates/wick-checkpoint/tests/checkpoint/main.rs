//! Weight files of other programs: real ones, broken ones, hostile ones and random ones.

mod archive;
mod gguf;
mod legacy;
mod pickle;
mod random;
mod real;
mod support;
