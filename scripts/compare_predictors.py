#!/usr/bin/env python3
"""Predictors of opt-9m side by side, at equal memory: quantised gates, closed forms, trained pairs (docs/bench/predictors.md).

    cargo build --release && python3 scripts/compare_predictors.py WORK_FOLDER

Every kind is fitted on assets/opt-9m/calibration.txt and judged on heldout.txt, which neither the model nor any predictor
saw. A quantised gate of 4, 2 or 1 bits sets the memory; low-rank pairs get the largest rank that takes no more, in f16 and in
8 bits. Prints a Markdown table; what was made before is kept in the folder and used again.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "assets" / "opt-9m"
WICK = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "wick"
RECALLS = ["0.97"]
HIDDEN, NEURONS, LAYERS = 256, 2048, 6


def wick(*words):
    said = subprocess.run([WICK, *map(str, words), "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(said.stdout.splitlines()[-1])


def size(path):
    return path.stat().st_size


def largest_rank(limit_bytes, weight_bytes):
    """A pair has rank * (hidden + neurons) weights and a bias a neuron; in 8 bits a scale a row, too."""
    fixed = LAYERS * 4 * NEURONS
    if weight_bytes == 1:
        fixed += LAYERS * 4 * NEURONS
    each = LAYERS * ((HIDDEN + NEURONS) * weight_bytes + (4 if weight_bytes == 1 else 0))
    return int((limit_bytes - fixed) // each)


def made(path, *words):
    if not path.exists():
        wick("predictor", *words, "--out", path)
    return path


def candidates(model, work):
    text = ["--text-file", TEXTS / "calibration.txt", "--tokens", 32768]
    for recall in RECALLS:
        for bits in [4, 2, 1]:
            gate = made(work / f"gate-{bits}-{recall}", "gate", model, *text, "--bits", bits, "--recall", recall)
            limit = size(gate)
            yield f"{bits} bits", recall, f"gate, {bits} bits", gate
            rank = largest_rank(limit, 2)
            closed = made(work / f"closed-{rank}-{recall}", "fit", model, *text, "--rank", rank, "--recall", recall)
            yield f"{bits} bits", recall, f"closed form, rank {rank}, f16", closed
            options = ["--rank", rank, "--keep-rank", "--last-layers", 0, "--target-recall", recall]
            trained = made(work / f"trained-{rank}-{recall}", "train", model, *text, *options)
            yield f"{bits} bits", recall, f"trained, rank {rank}, f16", trained
            wide = largest_rank(limit, 1)
            f16 = made(work / f"closed-{wide}-{recall}", "fit", model, *text, "--rank", wide, "--recall", recall)
            small = made(work / f"int8-{wide}-{recall}", "quantize", model, *text, "--predictors", f16, "--recall", recall)
            yield f"{bits} bits", recall, f"closed form, rank {wide}, 8 bits", small


def judged(model, file, heldout):
    """Quality, perplexity over that of dense, and KiB that a decoded token reads at that budget, with a run's own slots and policy."""
    use = ["--predictors", file, "--memory", "60%"]
    found = wick("predictor", "eval", model, *heldout, *use, "--tokens", 8192, "--ctx", 256)["all"]
    score = wick("eval", "ppl", model, *heldout, *use, "--ctx", 256, "--blocks", 80, "--no-bos")
    words = ["-p", "It was a dark evening, and", "-n", 240, "--ctx", 256, "--temperature", 1, "--seed", 1]
    reads = wick("run", model, *use, *words)["bytes_read_per_token"] / 1024
    return found, score["ratio"], reads


def main():
    work = Path(sys.argv[1])
    work.mkdir(parents=True, exist_ok=True)
    model = work / "opt-9m.wick"
    if not model.exists():
        subprocess.run([WICK, "convert", "--quiet", ROOT / "assets" / "opt-9m", model], check=True)
    heldout = ["--text-file", TEXTS / "heldout.txt"]
    print("| memory of | recall asked | predictor | KB | recall | selected | selected / active | mass missed | perplexity / dense | KiB read a token |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for memory, asked, name, file in candidates(model, work):
        figures = file.with_suffix(file.suffix + ".json")
        if not figures.exists():
            figures.write_text(json.dumps(judged(model, file, heldout)))
        found, ratio, reads = json.loads(figures.read_text())
        print(
            f"| {memory} | {asked} | {name} | {size(file) / 1000:.0f} | {found['recall']:.4f} | {100 * found['selected']:.1f} % "
            f"| {found['selected'] / found['active']:.2f} | {100 * found['mass_missed']:.2f} % | {ratio:.4f} | {reads:.0f} |",
            flush=True,
        )


main()
