#!/usr/bin/env python3
"""Reference numbers for a tiny Llama checkpoint, in float64 with numpy alone.

    python3 scripts/llama_reference.py tests/fixtures/llama-relu-gqa-f16

Writes expected_float64.json beside the weights, and prints how far expected.json is from it, with the rotary
frequencies as they are and rounded to f16: a model that was cast with `.half()` has them rounded, one that was
loaded in f16 has not.
"""
import glob
import json
import struct
import sys

import numpy as np

DTYPES = {"F16": np.float16, "F32": np.float32}


def load(folder):
    tensors = {}
    for path in glob.glob(f"{folder}/*.safetensors"):
        data = open(path, "rb").read()
        size = struct.unpack("<Q", data[:8])[0]
        for name, info in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = info["data_offsets"]
                values = np.frombuffer(data[8 + size + start : 8 + size + end], DTYPES[info["dtype"]])
                tensors[name] = values.reshape(info["shape"]).astype(np.float64)
    return tensors


def forward(config, tensors, ids, inv_freq):
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, seq = config["head_dim"], len(ids)
    angles = np.concatenate([np.arange(seq)[:, None] * inv_freq] * 2, -1)[:, None]
    mask = np.triu(np.full((seq, seq), -np.inf), 1)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * tensors[name + ".weight"]

    def linear(x, name):
        return x @ tensors[name + ".weight"].T

    def rope(x):
        turned = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * np.cos(angles) + turned * np.sin(angles)

    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        h = norm(x, name + "input_layernorm")
        q = rope(linear(h, name + "self_attn.q_proj").reshape(seq, heads, dim))
        k = rope(linear(h, name + "self_attn.k_proj").reshape(seq, kv_heads, dim))
        v = linear(h, name + "self_attn.v_proj").reshape(seq, kv_heads, dim)
        k, v = (np.repeat(t, heads // kv_heads, 1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + linear(np.einsum("hqk,khd->qhd", scores, v).reshape(seq, -1), name + "self_attn.o_proj")
        h = norm(x, name + "post_attention_layernorm")
        gate = np.maximum(linear(h, name + "mlp.gate_proj"), 0)  # relu
        x = x + linear(gate * linear(h, name + "mlp.up_proj"), name + "mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")


def main():
    folder = sys.argv[1]
    config = json.load(open(f"{folder}/config.json"))
    assert config["hidden_act"] == "relu"
    expected = json.load(open(f"{folder}/expected.json"))
    tensors, ids = load(folder), expected["ids"]
    theta = config["rope_parameters"]["rope_theta"]
    plain = 1 / theta ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    for label, inv_freq in [("f16", plain.astype(np.float16).astype(np.float64)), ("exact", plain)]:
        logits = forward(config, tensors, ids, inv_freq)
        worst = abs(logits[-1] - expected["last_logits"]).max()
        print(f"rotary frequencies {label}: expected.json's last logits differ by at most {worst:.2e}")
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = [logprobs[i - 1, ids[i]] for i in range(1, len(ids))]
    with open(f"{folder}/expected_float64.json", "w") as out:
        json.dump({"logprobs": picked, "last_logits": logits[-1].tolist()}, out)


main()
