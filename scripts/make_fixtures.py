#!/usr/bin/env python3
"""Tiny random checkpoints with reference numbers, for shapes and files that the other fixtures leave open.

    python3 scripts/make_fixtures.py [NAME ...]      # all of FIXTURES, or some; --table prints them as Markdown

Needs torch (1.13 or newer, CPU) and transformers 4.44.2; on Debian 12:

    apt-get install python3-torch python3-pip python3-venv
    /usr/bin/python3 -m venv --system-site-packages venv && venv/bin/pip install transformers==4.44.2 'numpy<2'

The models are built in float32, so nothing in them is rounded but the weights: these are rounded to the stored dtype
and computed with in float32. Checked are that every parameter matters and that rounding does not; the first seed is
taken whose greedy decoding has a margin of MARGIN and does not repeat one token. What is written is deterministic,
but for legacy .bin files, in which torch calls storages by their addresses.

Where transformers 4.44.2 cannot compute a variant, or computes it otherwise than newer releases, the entry says so
and `model` bends it to what newer releases do.
"""

import copy
import json
import sys
import zlib
from pathlib import Path

import fixture_parts as parts
import torch
import transformers
from fixture_table import FAMILIES, FIXTURES, VOCAB
from transformers.activations import ACT2FN

ROOT = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
PROMPT, GREEDY = 24, 24
MARGIN = 0.05


def build(fixture, seed):
    """The f32 model with rounded random weights, and its full config."""
    architecture, base = FAMILIES[fixture.family]
    config = base | fixture.config
    cls = getattr(transformers, architecture)
    model_config = cls.config_class(**copy.deepcopy(config))
    torch.manual_seed(seed)
    model = cls._from_config(model_config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith(".bias"):
            parameter.copy_(0.2 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(1 + 0.2 * noise)
        elif "embed" in name or "lm_head" in name:
            parameter.copy_(0.4 * noise)
        else:
            parameter.copy_(1.2 * noise / parameter.shape[1] ** 0.5)
        parameter.copy_(parameter.to(fixture.dtype))
    fixture.model(model)
    described = {"architectures": [architecture], "model_type": fixture.family} | config
    return model, described | {"torch_dtype": str(fixture.dtype).removeprefix("torch.")}


def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def compute(model, generator):
    ids = torch.randint(3, VOCAB, (PROMPT,), generator=generator).tolist()
    all_logits = logits(model, ids)
    logprobs = all_logits.double().log_softmax(-1)
    picked = [logprobs[i - 1, ids[i]].item() for i in range(1, PROMPT)]
    greedy, margin = [], float("inf")
    for _ in range(GREEDY):
        values, best = logits(model, ids + greedy)[-1].topk(2)
        margin = min(margin, (values[0] - values[1]).item())
        greedy.append(best[0].item())
    return {
        "ids": ids,
        "logprobs": [round(value, 7) for value in picked],
        "last_logits": [round(value, 7) for value in all_logits[-1].tolist()],
        "greedy": greedy,
        "greedy_margin_min": round(margin, 7),
    }


def check(name, fixture, model, ids):
    """Every parameter moves the logits; noise of float32's precision does not, so any order of summation will do."""
    before = logits(model, ids)
    for parameter_name, parameter in model.named_parameters():
        # Softmax does not see what all keys have in common, and that is the key bias where nothing is rotated.
        if fixture.family == "opt" and parameter_name.endswith("k_proj.bias"):
            continue
        kept = parameter.clone()
        parameter.add_(0.5 * kept.std() * torch.randn_like(kept))
        moved = (logits(model, ids) - before).abs().max().item()
        parameter.copy_(kept)
        if moved < 5e-3:
            print(f"{name}: {parameter_name} hardly matters ({moved:.1e})")
    for parameter in model.parameters():
        parameter.mul_(1 + 1.2e-7 * torch.randn_like(parameter))
    moved = (logits(model, ids) - before).abs().max().item()
    if moved > 3e-5:
        print(f"{name}: noise in the last bit moves the logits by {moved:.1e}")


def make(name, fixture):
    first = zlib.crc32(name.encode())
    for attempt in range(500):
        model, config = build(fixture, first + attempt)
        expected = compute(model, torch.Generator().manual_seed(first + attempt))
        if expected["greedy_margin_min"] >= MARGIN and len(set(expected["greedy"])) >= 4:
            break
    else:
        raise SystemExit(f"{name}: no seed has a margin of {MARGIN}")
    folder = ROOT / name
    folder.mkdir(exist_ok=True)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {key: value.clone().to(fixture.dtype) for key, value in model.state_dict().items() if key not in tied}
    tensors = fixture.tensors(state, config)
    (fixture.write or parts.safetensors)(folder, tensors)
    (folder / "config.json").write_text(json.dumps(fixture.stored(config), indent=1) + "\n")
    extra = {"convert": fixture.convert} if fixture.convert else {}
    (folder / "expected.json").write_text(json.dumps(expected | extra) + "\n")
    check(name, fixture, model, expected["ids"])
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB, seed {first}+{attempt}, margin {expected['greedy_margin_min']:.3f}")


def main():
    if sys.argv[1:] == ["--table"]:
        for name, fixture in FIXTURES.items():
            print(f"| `{name}` | {fixture.purpose} |")
        return
    transformers.logging.set_verbosity_error()
    ACT2FN["fatrelu"] = parts.FatRelu
    with torch.no_grad():
        for name in sys.argv[1:] or FIXTURES:
            make(name, FIXTURES[name])


main()
