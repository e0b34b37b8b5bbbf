#!/usr/bin/env python3
"""How good guesses are that `--lookahead` reads ahead by: opt-9m with its own predictors, in NumPy (docs/bench/decode.md).

    cargo build --release && python3 scripts/lookahead_guesses.py [--resident 0.33]

A guess for a layer is what that layer's predictor selects from the input of the layer before. Runs stretches of
assets/opt-9m/heldout.txt through the model, keeps the neurons used last of each layer resident (`lru`), and prints
by layer, a token: neurons selected, guessed, missing and read ahead; the share of what is missing that guesses name; and the share
of what they read that is used. The tokens are `wick score`'s. Needs numpy.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import smollm2

ASSETS = smollm2.ROOT / "assets" / "opt-9m"
DTYPES = {"F16": np.float16, "F32": np.float32}
STRETCH_CHARS, STRETCHES = 800, 6
# Tokens of a stretch that fill the cache and are not counted.
WARM_UP_TOKENS = 60


def tensors(path):
    """Metadata, and the float tensors of a safetensors file by name."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata, arrays = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        if entry["dtype"] in DTYPES:
            first, last = (start + offset for offset in entry["data_offsets"])
            array = np.frombuffer(data[first:last], DTYPES[entry["dtype"]])
            arrays[name] = array.reshape(entry["shape"]).astype(np.float32)
    return metadata, arrays


class Opt:
    """OPT with norms before attention and FFN, and a low-rank predictor a layer."""

    def __init__(self, folder):
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        _, self.weights = tensors(folder / "model.safetensors")
        metadata, self.predictors = tensors(folder / "predictors.safetensors")
        self.thresholds = [float(text) for text in metadata["thresholds"].split()]

    def norm(self, name, x):
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return centred / scale * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def attention(self, name, x):
        def heads(projection):
            y = self.linear(f"{name}.{projection}_proj", x)
            return y.reshape(len(x), self.heads, -1).transpose(1, 0, 2)

        query, key, value = map(heads, "qkv")
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
        scores += np.triu(np.full((len(x), len(x)), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return self.linear(f"{name}.out_proj", (shares @ value).transpose(1, 0, 2).reshape(x.shape))

    def ffn_inputs(self, ids):
        """What each layer's FFN multiplies, `(tokens, hidden)`."""
        positions = np.arange(len(ids)) + 2
        x = self.weights["model.decoder.embed_tokens.weight"][ids]
        x = x + self.weights["model.decoder.embed_positions.weight"][positions]
        inputs = []
        for index in range(self.layers):
            layer = f"model.decoder.layers.{index}"
            x = x + self.attention(f"{layer}.self_attn", self.norm(f"{layer}.self_attn_layer_norm", x))
            inputs.append(self.norm(f"{layer}.final_layer_norm", x))
            x = x + self.linear(f"{layer}.fc2", np.maximum(self.linear(f"{layer}.fc1", inputs[-1]), 0))
        return inputs

    def selected(self, index, x):
        """Which neurons the predictor of a layer selects, `(tokens, neurons)`."""
        predictor = f"model.decoder.layers.{index}.predictor"
        down, up, bias = (self.predictors[f"{predictor}.{part}"] for part in ("down.weight", "up.weight", "up.bias"))
        return x @ down.T @ up.T + bias >= self.thresholds[index]


def replay(selected, guessed, slots):
    """Sums over tokens behind the warm-up: tokens, selected, guessed, missing, read ahead, read ahead and used."""
    used_at = np.full(selected.shape[1], -1)
    sums = np.zeros(6)
    for token, (wanted, guess) in enumerate(zip(selected, guessed)):
        resident = np.zeros(len(wanted), bool)
        resident[np.argsort(-used_at, kind="stable")[:slots]] = True
        resident &= used_at >= 0
        if token >= WARM_UP_TOKENS:
            read = guess & ~resident
            counts = wanted, guess, wanted & ~resident, read, read & wanted
            sums += [1, *(count.sum() for count in counts)]
        used_at[wanted] = token
    return sums


def stretches(text_file):
    """Token ids of stretches of a text."""
    text = text_file.read_text()
    for start in range(0, STRETCHES * STRETCH_CHARS, STRETCH_CHARS):
        printed, _ = smollm2.wick("score", "demo", "--text", text[start : start + STRETCH_CHARS], "--json")
        yield json.loads(printed)["ids"]


def main():
    parser = argparse.ArgumentParser(description="how good guesses for the next layer are")
    parser.add_argument("--resident", type=float, default=0.33, help="share of the neurons that have a slot")
    arguments = parser.parse_args()
    model = Opt(ASSETS)
    sums = np.zeros((model.layers, 6))
    for ids in stretches(ASSETS / "heldout.txt"):
        inputs = model.ffn_inputs(ids)
        for index in range(1, model.layers):
            selected, guessed = (model.selected(index, inputs[of]) for of in (index, index - 1))
            sums[index] += replay(selected, guessed, int(arguments.resident * selected.shape[1]))
    print(f"{sums[1][0]:.0f} tokens, {100 * arguments.resident:.0f} % of the neurons resident")
    print("| layer | selected | guessed | missing | read ahead | of the missing named | of the read used |")
    print("|---|---|---|---|---|---|---|")
    rows = [(str(index), sums[index]) for index in range(1, model.layers)]
    for name, row in [*rows, (f"2 to {model.layers - 1}", sums[2:].sum(0))]:
        tokens, selected, guessed, missing, read, used = row
        counts = " | ".join(f"{count / tokens:.1f}" for count in (selected, guessed, missing, read))
        print(f"| {name} | {counts} | {100 * used / missing:.0f} % | {100 * used / read:.0f} % |")


if __name__ == "__main__":
    main()
