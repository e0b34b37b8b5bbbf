#!/usr/bin/env python3
"""Candle's own Llama and Mixtral in memory cgroups of their budgets (docs/bench/stock.md).

    python3 scripts/bench_stock.py [--write]

Needs root and a memory controller (cgroup v1 or v2); makes 1.5 GB of random checkpoints in a temporary folder.
Each row is a process of its own. In memory: the same program without a budget. `of sequential` is the rate at which
decoding read against that of large direct reads of the same file, probed by the same process right after.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/bench/stock.md"


def build(bench):
    """Where the program of `benches/{bench}.rs` lies."""
    command = ["cargo", "bench", "--bench", bench, "--no-run"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.search(rf"Executable benches/{bench}.rs \((.*)\)", result.stderr)
    if not found:
        sys.exit(result.stderr)
    return str(ROOT / found.group(1))


class Cgroup:
    def __init__(self, limit):
        self.v1 = os.path.exists("/sys/fs/cgroup/memory/memory.limit_in_bytes")
        root, file = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes") if self.v1 else ("/sys/fs/cgroup", "memory.max")
        self.path = pathlib.Path(root) / f"wick-stock-{os.getpid()}"
        self.path.mkdir()
        (self.path / file).write_text(str(limit))

    def oom_kills(self):
        text = (self.path / ("memory.oom_control" if self.v1 else "memory.events")).read_text()
        return int(re.search(r"oom_kill (\d+)", text).group(1))

    def close(self):
        self.path.rmdir()


def run(binary, folder, memory, tokens=10, limit=None):
    command = [binary, "run", folder, "-n", str(tokens)] + (["--memory", str(memory)] if memory else [])
    group = Cgroup(limit) if limit else None
    if group:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.path / "cgroup.procs")] + command
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{command}: {result.returncode}\n{result.stderr}")
    row = json.loads(result.stdout)
    row["oom_kills"] = group.oom_kills() if group else 0
    if group:
        group.close()
    return row


def mib(count):
    return f"{count / (1 << 20):.0f} MiB"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace docs/bench/stock.md")
    arguments = parser.parse_args()
    binary = build("stock")
    lines = [
        "| model (random weights, f32) | budget = cgroup limit | peak (VmHWM) | of in memory | in DRAM of the linear layers "
        "| read per token | ms per token | of sequential | same logits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(dir=ROOT / "target" if (ROOT / "target").exists() else None) as scratch:
        for kind, shares in (("llama", (0.70, 0.45, 0.30)), ("mixtral", (0.50, 0.20))):
            folder = os.path.join(scratch, kind)
            subprocess.run([binary, "make", kind, folder], check=True)
            rows = [run(binary, folder, None)]
            whole = rows[0]["peak_bytes"]
            for share in shares:
                budget = int(whole * share)
                rows.append(run(binary, folder, budget, limit=budget))
            for row in rows:
                print(json.dumps(row), flush=True)
                same = row["logits_checksum"] == rows[0]["logits_checksum"]
                budget = mib(row["budget_bytes"]) if row["memory"] else "none (in memory)"
                of_sequential = f"{row['of_sequential']:.2f}" if row["memory"] else "-"
                lines.append(
                    f"| {kind} | {budget} | {mib(row['peak_bytes'])} | {100 * row['peak_bytes'] / whole:.0f} % "
                    f"| {100 * row['resident_fraction']:.0f} % | {mib(row['read_bytes_per_token'])} "
                    f"| {1000 * row['seconds_per_token']:.0f} | {of_sequential} | {'yes' if same else 'NO'} |"
                )
                if row["oom_kills"] or not same:
                    sys.exit("\n".join(lines))
            os.remove(os.path.join(folder, "model.safetensors"))
    table = "\n".join(lines)
    print(table)
    if arguments.write:
        date = datetime.date.today().isoformat()
        PAGE.write_text(f"# Unmodified candle models\n\n`python3 scripts/bench_stock.py --write`, {date}, 2 cores.\n\n{table}\n")


if __name__ == "__main__":
    main()
