//! OPT inside a memory budget.
//!
//! `cargo run --release --example opt -- --model OUT --memory 60%`; its ReLU leaves most neurons at zero, so with predictors only
//! the others are read.

mod common;

fn main() -> anyhow::Result<()> {
    common::generate("opt", "It was a dark evening, and")
}
