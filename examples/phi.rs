//! Phi-1.5 and Phi-2 inside a memory budget.
//!
//! `cargo run --release --example phi -- --model OUT --memory 60%`

mod common;

fn main() -> anyhow::Result<()> {
    common::generate("phi", "The capital of France is")
}
