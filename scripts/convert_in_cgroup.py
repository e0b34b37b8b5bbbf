#!/usr/bin/env python3
"""Converts a checkpoint of 3.3 GB in a memory cgroup of 1 GiB, and prints what it took.

    cargo build --release && python3 scripts/convert_in_cgroup.py [--bin] [--limit MIB] [--layers N] [--dir DIR]

The checkpoint is a Llama of 1.7 B parameters in f16, random, in two shards: safetensors, or with `--bin` the zip
archives with pickles that `torch.save` writes (made here without torch). Twice its size is needed on the disk under
DIR, and given back. Needs Linux, root and a memory cgroup, v1 or v2; fails when the conversion does, when the kernel
kills in the cgroup, or when what was written does not run.
"""

import argparse
import collections
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, FFN, VOCAB, HEADS = 2048, 5632, 32000, 32
BLOCK_BYTES = 64 << 20


def shapes(layers):
    """Name and shape of each tensor."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            yield f"{prefix}self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (FFN, HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", (HIDDEN, FFN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def size_of(shape):
    """Bytes in f16."""
    return 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)


class Weights:
    """Bytes of f16 numbers between 1/32 and 1/16 in magnitude, another part of one random block for each tensor."""

    def __init__(self):
        block = bytearray(random.Random(1).randbytes(BLOCK_BYTES))
        block[1::2] = block[1::2].translate(bytes(byte & 0x83 | 0x28 for byte in range(256)))
        self.block = memoryview(block)
        self.start = 0

    def write(self, file, count):
        self.start = (self.start + 2 * 7919) % BLOCK_BYTES
        at = self.start
        while count:
            part = self.block[at : at + count]
            file.write(part)
            count -= len(part)
            at = 0


def write_safetensors(path, tensors, weights):
    header, offset = {}, 0
    for name, shape in tensors:
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, offset + size_of(shape)]}
        offset += size_of(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in tensors:
            weights.write(file, size_of(shape))


def stand_in(module, name):
    """Something that pickles as `module.name` of torch, which need not be installed."""
    stand_in = type(name, (), {"__module__": module})
    sys.modules.setdefault(module, types.ModuleType(module))
    setattr(sys.modules[module], name, stand_in)
    return stand_in


class Storage:
    def __init__(self, key, count):
        self.id = ("storage", HALF_STORAGE, key, "cpu", count)


class Tensor:
    def __init__(self, key, shape):
        strides = (shape[1], 1) if len(shape) > 1 else (1,)
        storage = Storage(key, size_of(shape) // 2)
        self.parts = (storage, 0, shape, strides, False, collections.OrderedDict())

    def __reduce__(self):
        return REBUILD_TENSOR, self.parts


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return value.id if isinstance(value, Storage) else None


HALF_STORAGE = stand_in("torch", "HalfStorage")
REBUILD_TENSOR = stand_in("torch._utils", "_rebuild_tensor_v2")


def write_bin(path, tensors, weights):
    state = collections.OrderedDict((name, Tensor(str(key), shape)) for key, (name, shape) in enumerate(tensors))
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open(f"{path.stem}/data.pkl", "w") as file:
            Pickler(file, protocol=2).dump(state)
        for key, (_, shape) in enumerate(tensors):
            entry = zipfile.ZipInfo(f"{path.stem}/data/{key}")
            entry.file_size = size_of(shape)
            with archive.open(entry, "w") as file:
                weights.write(file, size_of(shape))
        archive.writestr(f"{path.stem}/version", "3\n")


def write_checkpoint(folder, layers, as_bin):
    """Two shards, their index and a config; the bytes of all tensors."""
    stem, extension = ("pytorch_model", "bin") if as_bin else ("model", "safetensors")
    write = write_bin if as_bin else write_safetensors
    tensors, weights, weight_map = list(shapes(layers)), Weights(), {}
    middle = len(tensors) // 2
    for number, part in enumerate((tensors[:middle], tensors[middle:]), 1):
        name = f"{stem}-{number:05}-of-00002.{extension}"
        write(folder / name, part, weights)
        weight_map |= {tensor: name for tensor, _ in part}
    total = sum(size_of(shape) for _, shape in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.{extension}.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return total


class Cgroup:
    """A memory cgroup with a limit and no swap beyond it."""

    def __init__(self, limit_bytes):
        self.v1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
        root = Path("/sys/fs/cgroup/memory" if self.v1 else "/sys/fs/cgroup")
        self.path = root / f"wick-convert-{os.getpid()}"
        self.path.mkdir()
        self.set("memory.limit_in_bytes" if self.v1 else "memory.max", limit_bytes)
        swap = "memory.memsw.limit_in_bytes" if self.v1 else "memory.swap.max"
        if (self.path / swap).exists():
            self.set(swap, limit_bytes if self.v1 else 0)

    def set(self, name, value):
        (self.path / name).write_text(str(value))

    def join(self):
        self.set("cgroup.procs", os.getpid())

    def peak_bytes(self):
        """Page cache included, so near the limit whenever more is read than fits; `None` on an older kernel."""
        file = self.path / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")
        return int(file.read_text()) if file.exists() else None

    def oom_kills(self):
        text = (self.path / ("memory.oom_control" if self.v1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


def mib(count):
    return "unknown" if count is None else f"{count / 2**20:.0f} MiB"


def convert(source, out, limit_bytes):
    """Converts inside a cgroup; rows of the table, and whether all was well."""
    binary = os.path.join(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "release", "wick")
    group = Cgroup(limit_bytes)
    try:
        started = time.monotonic()
        command = [binary, "convert", source, out, "--quiet"]
        child = subprocess.Popen(command, preexec_fn=group.join)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds, kills, peak = time.monotonic() - started, group.oom_kills(), group.peak_bytes()
    finally:
        group.path.rmdir()
    well = child.returncode == 0 and kills == 0
    run = subprocess.run([binary, "run", out, "--ids", "1,2,3", "-n", "1", "--json"], stdout=subprocess.PIPE)
    return {
        "limit of the cgroup": mib(limit_bytes),
        "peak of the cgroup, page cache included": mib(peak),
        "peak of the process": mib(usage.ru_maxrss * 1024),
        "killed by the kernel": kills,
        "exit code of convert": child.returncode,
        "time": f"{seconds:.0f} s",
        "exit code of run on what was written": run.returncode,
    }, well and run.returncode == 0


def main():
    parser = argparse.ArgumentParser(description="conversion in a memory cgroup")
    parser.add_argument("--bin", action="store_true", help="PyTorch archives instead of safetensors")
    parser.add_argument("--limit", type=int, default=1024, help="MiB of memory [1024]")
    parser.add_argument("--layers", type=int, default=30, help="layers of 103 MB [30]")
    parser.add_argument("--dir", help="folder with room for the checkpoint and its conversion")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wick-convert-", dir=arguments.dir) as folder:
        source, out = Path(folder, "source"), Path(folder, "out")
        source.mkdir()
        total = write_checkpoint(source, arguments.layers, arguments.bin)
        # So that writing back what was just made is not counted as the conversion's time.
        os.sync()
        rows, well = convert(source, out, arguments.limit << 20)
    form = "PyTorch .bin" if arguments.bin else "safetensors"
    print(f"| checkpoint | {total / 1e9:.2f} GB, f16, two {form} shards |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    sys.exit(0 if well else 1)


main()
