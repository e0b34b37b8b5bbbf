#!/usr/bin/env python3
"""Candle's own struct with its FFNs on flash beside our own definition, in memory cgroups (docs/bench/sparse.md).

    python3 scripts/bench_sparse.py FOLDER --memory none,4GiB --selector dense,dip [--density 0.5] [--text-file TEXT]
        [--tokens N] [--rounds N] [--f16] [--quantized]

FOLDER is a converted Llama or Falcon. Each row is a process of its own, ours and candle's in turn; with a budget in bytes it
runs in a memory cgroup of exactly that, so it needs root and a memory controller then. Times are medians over all rounds.
"""
import argparse
import json
import re
import statistics
import subprocess
import sys

from bench_stock import Cgroup, build, mib

UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def limit_bytes(memory):
    found = re.fullmatch(r"([\d.]+)(MiB|GiB)", memory)
    return int(float(found.group(1)) * UNITS[found.group(2)]) if found else None


def run(command, memory):
    limit = limit_bytes(memory)
    group = Cgroup(limit) if limit else None
    if group:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.path / "cgroup.procs")] + command
    result = subprocess.run(command, capture_output=True, text=True)
    kills = group.oom_kills() if group else 0
    if group:
        group.close()
    if result.returncode != 0 or kills:
        sys.exit(f"{command}: {result.returncode}, {kills} OOM kills\n{result.stderr}")
    return json.loads(result.stdout)


def cell(rows):
    middle = statistics.median(row["ms_median"] for row in rows)
    return middle, f"{middle:.1f} ({min(row['ms_min'] for row in rows):.1f}..{max(row['ms_max'] for row in rows):.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--memory", default="none")
    parser.add_argument("--selector", default="dense")
    parser.add_argument("--density", default="0.5")
    parser.add_argument("--text-file")
    parser.add_argument("--tokens", default="128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--f16", action="store_true", help="let candle compute in f16")
    parser.add_argument("--quantized", action="store_true", help="candle's quantized Llama, which needs no patch")
    arguments = parser.parse_args()
    theirs_by = "quantized" if arguments.quantized else "stock"
    binary = build("sparse")
    print(
        "| selector | budget | ours: ms a token | candle's struct | ratio | MB read a token | perplexity | peak |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for memory in arguments.memory.split(","):
        for selector in arguments.selector.split(","):
            command = [binary, arguments.folder, "--selector", selector, "--density", arguments.density]
            command += ["--tokens", arguments.tokens]
            command += ["--memory", memory] if memory != "none" else []
            command += ["--text-file", arguments.text_file] if arguments.text_file else []
            rows = {"own": [], theirs_by: []}
            for _ in range(arguments.rounds):
                for by, seen in rows.items():
                    more = ["--f16"] if arguments.f16 and by == "stock" else []
                    seen.append(run(command + ["--by", by] + more, memory))
            own, stock = rows["own"], rows[theirs_by]
            (ours, ours_text), (theirs, theirs_text) = cell(own), cell(stock)
            name = f"{selector} {arguments.density}" if selector not in ("dense", "lowrank", "oracle") else selector
            read = [f"{row[0]['read_bytes_per_token'] / 1e6:.1f}" for row in (own, stock)]
            perplexity = [f"{row[0]['perplexity']:.4f}" for row in (own, stock)]
            peak = [mib(max(row["peak_bytes"] for row in side)) for side in (own, stock)]
            print(
                f"| {name} | {memory} | {ours_text} | {theirs_text} | {theirs / ours:.2f} | {' / '.join(read)} "
                f"| {' / '.join(perplexity)} | {' / '.join(peak)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
