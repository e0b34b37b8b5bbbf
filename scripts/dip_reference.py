#!/usr/bin/env python3
"""Perplexity of dynamic input pruning, by transformers with hooks and by `wick score`, and of its rivals by transformers.

    cargo build --release && python3 scripts/dip_reference.py MODEL.gguf TEXT [--write]

MODEL.gguf is a gated Llama (scripts/smollm2.py fetches SmolLM2-135M); its weights are dequantised to float32 here, and by
`wick convert --dtype f16 --layout channel` there. TEXT goes through both in blocks of 512 tokens without a BOS. Hooks do to the
inputs of the MLPs' linears what the selectors do to columns:

- dip: the largest inputs of gate and up, the largest of down; split of the density as published;
- glu: the largest inputs of down alone, gate and up are dense;
- gate, up: neurons by the size of act(gate), or of up; the matrix that decides is dense;
- cats: as gate, with a threshold for each layer from the first block, instead of a count for each token.

Density is the share of the MLP weights that a token is multiplied with. Fails where `wick` and transformers differ by more than
0.5 %. Needs torch, transformers, tokenizers and gguf.
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


def main():
    parser = argparse.ArgumentParser(description="dip by transformers and by wick")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--density", type=float, nargs="+", default=[0.8, 0.65, 0.5, 0.35])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    rivals = ["dip-ca", "glu", "gate", "up", "cats"]
    parser.add_argument("--methods", nargs="*", default=rivals, help="what to measure beside dip")
    parser.add_argument("--write", action="store_true", help="write docs/bench/dip.md")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = load(arguments.gguf)
    wrong, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model.wick"
        wick("convert", arguments.gguf, out, "--dtype", "f16", "--layout", "channel")
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        ids = torch.tensor(tokenizer.encode(arguments.text.read_text(), add_special_tokens=False).ids)
        score = ("score", out, "--text-file", arguments.text, "--block-tokens", BLOCK_TOKENS)
        score += ("--blocks", arguments.blocks, "--no-bos", "--json")

        def ours(*flags):
            return json.loads(wick(*score, *flags))["perplexity"]

        def compare(what, got, expected):
            print(f"{what}: wick {got:.3f}, transformers {expected:.3f}", flush=True)
            if abs(got / expected - 1) > TOLERANCE:
                wrong.append(f"{what}: {got:.3f} is not {expected:.3f} within {TOLERANCE:.1%}")

        dense = ours("--selector", "dense"), perplexity(model, ids, arguments.blocks)
        compare("dense", *dense)
        for density in arguments.density:
            flags = ("--density", density)
            got = ours("--selector", "dip", *flags)
            expected = perplexity(model, ids, arguments.blocks, "dip", density)
            compare(f"dip {density}", got, expected)
            aware = ours("--selector", "dip-ca", *flags, "--memory", "75%") if "dip-ca" in arguments.methods else math.nan
            # A method whose dense part alone is more has no such density.
            possible = {"glu": 2 / 3, "gate": 1 / 3, "up": 1 / 3, "cats": 1 / 3}
            rivals = [
                f"{perplexity(model, ids, arguments.blocks, method, density):.2f}"
                if method in arguments.methods and density > possible[method]
                else "-"
                for method in possible
            ]
            print(f"dip-ca {density}: {aware:.3f}; glu, gate, up, cats: {', '.join(rivals)}", flush=True)
            rows.append([f"{density:.2f}", f"{got:.2f}", f"{expected:.2f}", f"{aware:.2f}", *rivals])
    head = ["density", "dip", "dip (transformers)", "dip-ca, 75 % of the weights in memory", "GLU", "gate", "up", "CATS"]
    rows.insert(0, ["1", f"{dense[0]:.2f}", f"{dense[1]:.2f}", f"{dense[0]:.2f}", *[f"{dense[1]:.2f}"] * 4])
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    print(table)
    if arguments.write and not wrong:
        page = f"""# Dynamic input pruning, by wick and by transformers

`cargo build --release && python3 scripts/dip_reference.py MODEL.gguf TEXT --write`, {datetime.date.today()}:
{arguments.gguf.name} on {arguments.text.name}, {arguments.blocks} blocks of {BLOCK_TOKENS} tokens, no BOS. Perplexity; density is the
share of the FFN weights that a token is multiplied with. The first and the third column are `wick score`, in f16; the others
are transformers with hooks, in float32.

{table}
"""
        (ROOT / "docs" / "bench" / "dip.md").write_text(page)
    if wrong:
        sys.exit("\n".join(wrong))


main()
