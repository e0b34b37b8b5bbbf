#!/usr/bin/env python3
"""The README's table: the embedded model by selector and budget, medians of five runs (min..max).

    cargo build --release && python3 scripts/bench_demo.py

Rows take turns, so that a noisy minute hits all of them.
"""
import json
import os
import statistics
import subprocess
import sys

ROWS = [("dense", "all"), ("dense", "60%"), ("lowrank", "all"), ("lowrank", "60%"), ("lowrank", "45%")]
ROUNDS = 5


def run(selector, memory):
    binary = os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release", "wick")
    # "all" leaves room for everything, predictors included.
    memory = "64MiB" if memory == "all" else memory
    command = [binary, "run", "demo", "-n", "192", "--temperature", "0", "--selector", selector, "--memory", memory, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1])


def main():
    results = {row: [] for row in ROWS}
    for _ in range(ROUNDS):
        for row in ROWS:
            results[row].append(run(*row))
    print("| selector | weights in DRAM | peak of the process | of the FFN selected | read per token | tokens/s |")
    print("|---|---|---|---|---|---|")
    for (selector, memory), runs in results.items():
        speeds = [run["tokens_per_s"] for run in runs]
        last = runs[-1]
        print(
            f"| {selector} | {memory} | {last['peak_bytes'] / 2**20:.0f} MiB "
            f"| {100 * last['selected_fraction']:.1f} % | {last['bytes_read_per_token'] / 1024:.0f} KiB "
            f"| {statistics.median(speeds):.0f} ({min(speeds):.0f}..{max(speeds):.0f}) |"
        )
    print(f"\nI/O: {last['io_mode']}; predictor recall {last['predictor_recall']:.3f}", file=sys.stderr)


main()
