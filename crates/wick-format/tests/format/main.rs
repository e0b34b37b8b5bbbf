//! The rules of `docs/FORMAT.md`, by their numbers: each is broken here and must be refused.

mod files;
mod manifest;
mod random;
mod tensors;
