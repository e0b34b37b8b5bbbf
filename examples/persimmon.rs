//! Persimmon inside a memory budget.
//!
//! `cargo run --release --example persimmon -- --model OUT --memory 60%`; of its 262 thousand embedding rows only those of the text are
//! read.

mod common;

fn main() -> anyhow::Result<()> {
    common::generate("persimmon", "A persimmon is")
}
