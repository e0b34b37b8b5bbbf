#!/usr/bin/env bash
# The kernels' tests on 64-bit ARM, run by an emulator: needs rustup and qemu's user mode (Debian: qemu-user-static).
# What is right here is right on real ARM; how fast it is can only be measured there.
set -euo pipefail
cd "$(dirname "$0")/../crates/wick-kernels"

target=aarch64-unknown-linux-musl
rustup target add "$target"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=qemu-aarch64-static
cargo test --release --target "$target" --lib
