#!/usr/bin/env bash
# gemm 0.19.0 beside wick-gemm: are all products the same bits, and does one of them take longer?
# Usage: scripts/compare_gemm.sh [PRODUCTS] [ROUNDS]; builds in target/gemm.
set -euo pipefail
cd "$(dirname "$0")/.."
products=${1:-20000} rounds=${2:-5}
build() { # NAME CARGO-ARGUMENTS...
  local name=$1
  shift
  mkdir -p "target/gemm/$name"
  # Each has a lock file of its own: the patch is part of it.
  cp -r benches/gemm/Cargo.toml benches/gemm/src "target/gemm/$name"
  cargo build --release --quiet --manifest-path "target/gemm/$name/Cargo.toml" --target-dir target/gemm/build "$@"
  cp target/gemm/build/release/gemm-products "target/gemm/$name/run"
}
build real
build wick --config "patch.crates-io.gemm.path=\"$PWD/crates/wick-gemm\""
# With 300 weights elsewhere, which each product has to be told from.
RUSTFLAGS="--cfg wick" build used --config "patch.crates-io.gemm.path=\"$PWD/crates/wick-gemm\""
for name in real wick; do
  "target/gemm/$name/run" checksums "$products" > "target/gemm/$name/checksums"
done
if cmp --silent target/gemm/{real,wick}/checksums; then
  echo "$((3 * products)) products: all the same bits"
else
  diff target/gemm/{real,wick}/checksums | head
  exit 1
fi
# In turn, many times and shortly, so that both see the same machine; of each turn the least counts.
for _ in $(seq 12); do
  for name in real wick used; do "target/gemm/$name/run" times "$rounds"; done
done > target/gemm/times
python3 - << 'PYTHON'
import collections
times = collections.defaultdict(lambda: ([], [], []))
seen = collections.Counter()
for line in open("target/gemm/times"):
    shape, numbers = line.rsplit(": ", 1)
    times[shape][seen[shape] % 3].append([int(number) for number in numbers.split()])
    seen[shape] += 1
def cell(turns):
    least = sorted(low for _, low, _ in turns)
    return least[len(least) // 2], least[0], least[-1]


print("Nanoseconds, of the least of each turn: median (min..max).\n")
print("| product | gemm 0.19.0 | wick-gemm | ratio: medians, least | with 300 weights elsewhere | ratio: medians, least |")
print("|---|---|---|---|---|---|")
for shape, sides in times.items():
    real, *others = map(cell, sides)
    row = [shape, "{} ({}..{})".format(*real)]
    for other in others:
        row += ["{} ({}..{})".format(*other), f"{other[0] / real[0]:.3f}, {other[1] / real[1]:.3f}"]
    print("| " + " | ".join(row) + " |")
PYTHON
