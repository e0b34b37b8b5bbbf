//! Falcon inside a memory budget.
//!
//! `cargo run --release --example falcon -- --model OUT --memory 60%`; a relufied checkpoint whose config does not say so is
//! converted with `--activation relu`.

mod common;

fn main() -> anyhow::Result<()> {
    common::generate("falcon", "The peregrine falcon is")
}
