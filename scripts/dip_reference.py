#!/usr/bin/env python3
"""Perplexity of dynamic input pruning and of its rivals, by transformers with hooks and by `wick score`.

    cargo build --release && python3 scripts/dip_reference.py MODEL.gguf TEXT [--write]

MODEL.gguf is a gated Llama (scripts/smollm2.py fetches SmolLM2-135M); its weights are dequantised to float32 here, and by
`wick convert --dtype f32 --layout both` there: f16 would move values
across the limit of being kept, and perplexities by half a percent. TEXT goes through both in blocks of 512 tokens without a BOS. Hooks do to the
inputs of the MLPs' linears what the selectors do to columns:

- dip: the largest inputs of gate and up, the largest of down; split of the density as published;
- glu: the largest inputs of down alone, gate and up are dense;
- gate, up: neurons by the size of act(gate), or of up; the matrix that decides is dense;
- cats: as gate, with a threshold for each layer from the first block, instead of a count for each token.

Density is the share of the MLP weights that a token is multiplied with. Fails where `wick` and transformers differ by more than
0.5 %, but for cats, whose thresholds are of other tokens: `wick` takes them from the first 128. Needs torch, transformers, tokenizers and gguf.
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
BLOCK_TOKENS, BLOCKS = 512, 16
TOLERANCE = 0.005
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def load(path):
    """The GGUF file as a transformers model in float32."""
    reader = GGUFReader(path)

    def key(name):
        return reader.fields[f"llama.{name}"].contents()

    heads = {"attn_q": key("attention.head_count"), "attn_k": key("attention.head_count_kv")}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        *layer, part = tensor.name.removesuffix(".weight").removeprefix("blk.").split(".")
        if part in heads:
            # GGUF keeps the two halves that a rotation turns side by side.
            values = values.reshape(heads[part], -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        name = f"model.layers.{layer[0]}.{NAMES[part]}" if layer else NAMES[part]
        weights[f"{name}.weight"] = torch.from_numpy(numpy.ascontiguousarray(values, dtype=numpy.float32))
    vocab_size, hidden_size = weights["model.embed_tokens.weight"].shape
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_theta=key("rope.freq_base"),
        max_position_embeddings=key("context_length"),
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def tokenizer_of(path):
    """The tokenizer, its merges in the form that old and new versions read: one string, its halves apart by a space."""
    description = json.loads(path.read_text())
    merges = description["model"]["merges"]
    description["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return Tokenizer.from_str(json.dumps(description))


def largest(x, share):
    """1 for the largest values of each row of `x`, a share of them rounded down, and 0 for the others."""
    count = max(1, int(share * x.shape[-1]))
    return torch.zeros_like(x).scatter(-1, x.abs().topk(count, -1).indices, 1.0)


def dip_split(density):
    """Shares kept of the inputs of gate and up, and of down's."""
    if density == 1:
        return 1.0, 1.0
    logit = math.log(density / (1 - density))
    inputs = 1 / (1 + math.exp(-(0.98499307 * logit + 0.29976478)))
    return inputs, min(1.0, 3 * density - 2 * inputs)


def hooks(model, method, density, ids):
    """Hooks that prune; `ids` is what thresholds are taken from."""
    handles = []
    act = torch.nn.functional.silu
    share = {"glu": 3 * density - 2, "gate": (3 * density - 1) / 2, "up": (3 * density - 1) / 2}
    share["cats"] = share["gate"]
    inputs, activations = dip_split(density)
    for layer in model.model.layers:
        mlp, seen = layer.mlp, {}

        def keep(module, args, share):
            (x,) = args
            return (x * largest(x, share),)

        def remember(module, args, output, seen=seen):
            seen["deciding"] = output

        def by_neuron(module, args, seen=seen):
            deciding = act(seen["deciding"]) if method in ("gate", "cats") else seen["deciding"]
            if method == "cats":
                threshold = seen.setdefault("threshold", deciding.abs().flatten().kthvalue(
                    max(1, round((1 - share["cats"]) * deciding.numel()))).values)
                return (args[0] * (deciding.abs() > threshold),)
            return (args[0] * largest(deciding, share[method]),)

        if method == "dip":
            handles.append(mlp.register_forward_pre_hook(lambda m, a: keep(m, a, inputs)))
            handles.append(mlp.down_proj.register_forward_pre_hook(lambda m, a: keep(m, a, activations)))
        elif method == "glu":
            handles.append(mlp.down_proj.register_forward_pre_hook(lambda m, a: keep(m, a, share["glu"])))
        else:
            deciding = mlp.up_proj if method == "up" else mlp.gate_proj
            handles.append(deciding.register_forward_hook(remember))
            handles.append(mlp.down_proj.register_forward_pre_hook(by_neuron))
    if method == "cats":
        model(ids[:BLOCK_TOKENS].unsqueeze(0))
    return handles


@torch.no_grad()
def perplexity(model, ids, blocks, method=None, density=1.0):
    handles = hooks(model, method, density, ids) if method else []
    total, count = 0.0, 0
    for start in range(0, blocks * BLOCK_TOKENS, BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS]
        logits = model(block.unsqueeze(0)).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, block[1:], reduction="sum").item()
        count += BLOCK_TOKENS - 1
    for handle in handles:
        handle.remove()
    return math.exp(total / count)


def wick(*words):
    binary = os.path.join(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "release", "wick")
    done = subprocess.run([binary, *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"wick {words[0]} failed")
    return done.stdout


# The selectors' names, and the densities that their dense parts take already.
RIVALS = {"glu": ("prune-glu", 2 / 3), "gate": ("prune-gate", 1 / 3), "up": ("prune-up", 1 / 3), "cats": ("cats", 1 / 3)}


def main():
    parser = argparse.ArgumentParser(description="dip and its rivals by transformers and by wick")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--density", type=float, nargs="+", default=[0.8, 0.65, 0.5, 0.35])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=list(RIVALS), help="what to measure beside dip")
    parser.add_argument("--write", action="store_true", help="write docs/bench/dip-reference.md")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = load(arguments.gguf)
    wrong, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model.wick"
        wick("convert", arguments.gguf, out, "--dtype", "f32", "--layout", "both")
        tokenizer = tokenizer_of(out / "tokenizer.json")
        ids = torch.tensor(tokenizer.encode(arguments.text.read_text(), add_special_tokens=False).ids)
        score = ("score", out, "--text-file", arguments.text, "--block-tokens", BLOCK_TOKENS)
        score += ("--blocks", arguments.blocks, "--no-bos", "--json")

        def both(selector, method=None, density=None, is_strict=True):
            """A cell of the table: wick's perplexity beside that of transformers."""
            flags = ("--density", density) if density else ()
            got = json.loads(wick(*score, "--selector", selector, *flags))["perplexity"]
            expected = perplexity(model, ids, arguments.blocks, method, density or 1.0)
            print(f"{selector} {density or ''}: wick {got:.3f}, transformers {expected:.3f}", flush=True)
            if is_strict and abs(got / expected - 1) > TOLERANCE:
                wrong.append(f"{selector} {density}: {got:.3f} is not {expected:.3f} within {TOLERANCE:.1%}")
            return f"{got:.2f} / {expected:.2f}"

        rivals = {method: RIVALS[method] for method in arguments.rivals}
        rows.append(["1", *[both("dense")] * (1 + len(rivals))])
        for density in arguments.density:
            row = [f"{density:.2f}", both("dip", "dip", density)]
            for method, (selector, dense_part) in rivals.items():
                # A method whose dense part alone is more has no such density.
                is_there = density > dense_part
                row.append(both(selector, method, density, method != "cats") if is_there else "-")
            rows.append(row)
    head = ["density", "dip", *[selector for selector, _ in rivals.values()]]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    print(table)
    if arguments.write and not wrong:
        page = f"""# Dynamic input pruning and its rivals, by wick and by transformers

`cargo build --release && python3 scripts/dip_reference.py MODEL.gguf TEXT --write`, {datetime.date.today()}:
{arguments.gguf.name} on {arguments.text.name}, {arguments.blocks} blocks of {BLOCK_TOKENS} tokens, no BOS. Perplexity by `wick score`, and
behind the stroke by transformers with hooks, both in float32; density is the share of the FFN weights that a token is multiplied with.

{table}
"""
        (ROOT / "docs" / "bench" / "dip-reference.md").write_text(page)
    if wrong:
        sys.exit("\n".join(wrong))


main()
