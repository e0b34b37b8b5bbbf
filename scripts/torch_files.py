#!/usr/bin/env python3
"""Tiny PyTorch files of every kind that `wick-checkpoint` reads, and what PyTorch itself reads in them.

    python3 scripts/torch_files.py crates/wick-checkpoint/tests/files

Writes the files and expected.json: for each file each tensor's dtype, shape, strides and values. Needs PyTorch 1.13 or
later. The values are small whole numbers and halves, which every dtype holds.
"""
import argparse
import json
import os
import pickle
import struct
import sys
from collections import OrderedDict

import numpy as np
import torch

SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}


def numbers(*shape, start=0.0, dtype=torch.float32):
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float32) / 2 + start).reshape(shape).to(dtype)


def dtypes():
    tensors = {name.lower(): numbers(2, 3, dtype=dtype) for dtype, name in SAFETENSORS_NAMES.items()}
    return {**tensors, "scalar": torch.tensor(7.5), "empty": torch.zeros(0, 4), "note": "no tensor", "nothing": None}


def views():
    whole = numbers(4, 6, dtype=torch.float16)
    tagged = numbers(3)
    tagged.tag = "an attribute"  # makes _rebuild_from_type_v2 of it
    return OrderedDict(
        whole=whole, tied=whole, transposed=whole.t(), rows=whole[1:3], columns=whole[:, 2:5], step=whole[::2, 1::2],
        expanded=numbers(1, 3).expand(4, 3), parameter=torch.nn.Parameter(numbers(2, 2)), tagged=tagged,
    )


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)  # has an integer buffer
        self.head = torch.nn.Linear(4, 5, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(numbers(5, 4, start=-3))
        self.head.weight = self.embed.weight


def nested(key):
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return {
        "optimizer": optimizer.state_dict(), "args": argparse.Namespace(lr=1e-3, sizes=[1, 2]), "epoch": 3,
        "best": np.float64(0.5), "rng": np.random.RandomState(0).get_state()[0], "when": {"big": 2**80, "set": {1, 2}},
        key: Tied().half().state_dict(),
    }


class Runs:
    """Pickles to a call of `os.system`."""

    def __reduce__(self):
        return os.system, ("touch the-pickle-was-executed",)


def save(folder, name, value, **options):
    torch.save(value, os.path.join(folder, name), **options)


def legacy_with_parts(folder, name):
    """The storage views that PyTorch before 0.4 wrote: a key, and a part of what lies under it."""
    root = numbers(10)
    parts = {"first": (0, 4), "last": (6, 4)}

    class Stand:
        def __init__(self, part):
            self.part = part

    class Rebuilt:
        def __init__(self, part):
            self.part = part

        def __reduce__(self):
            count = parts[self.part][1]
            return torch._utils._rebuild_tensor, (Stand(self.part), 1, (count - 1,), (1,))

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if not isinstance(value, Stand):
                return None
            offset, count = parts[value.part]
            return ("storage", torch.FloatStorage, "root", "cpu", 10, (f"view {value.part}", offset, count))

    with open(os.path.join(folder, name), "wb") as file:
        pickle.dump(torch.serialization.MAGIC_NUMBER, file, protocol=2)
        pickle.dump(torch.serialization.PROTOCOL_VERSION, file, protocol=2)
        system = dict(protocol_version=1001, little_endian=True, type_sizes=dict(short=2, int=4, long=4))
        pickle.dump(system, file, protocol=2)
        Pickler(file, protocol=2).dump(OrderedDict((part, Rebuilt(part)) for part in parts))
        pickle.dump(["root"], file, protocol=2)
        file.write(struct.pack("<q", 10) + root.numpy().tobytes())


def expected(folder, name):
    loaded = torch.load(os.path.join(folder, name))
    for key in ["state_dict", "model", "module"]:
        if not any(torch.is_tensor(value) for value in loaded.values()):
            loaded = loaded.get(key, loaded)
    described = {}
    for key, tensor in loaded.items():
        if torch.is_tensor(tensor):
            described[key] = {
                "dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape),
                "strides": list(tensor.stride()), "values": tensor.detach().double().flatten().tolist(),
            }
    return described


def main():
    folder = sys.argv[1]
    good = []
    for kind, zipped in [("zip", True), ("legacy", False)]:
        options = dict(_use_new_zipfile_serialization=zipped)
        for protocol in [2, 4]:
            good.append(f"{kind}-views-protocol-{protocol}.pt")
            save(folder, good[-1], views(), pickle_protocol=protocol, **options)
        for name, value in [
            ("dtypes", dtypes()), ("module", Tied().state_dict()), ("nested-model", nested("model")),
            ("nested-state-dict", nested("state_dict")),
        ]:
            good.append(f"{kind}-{name}.pt")
            save(folder, good[-1], value, **options)
        save(folder, f"{kind}-runs.pt", {"weight": Runs(), "bias": numbers(2)}, **options)
        save(folder, f"{kind}-runs-nested.pt", {"model": Runs(), "epoch": 1}, **options)
        save(folder, f"{kind}-runs-beside.pt", {"model": {"weight": numbers(2)}, "optimizer": Runs()}, **options)
    save(folder, "zip-runs-whole.pt", Runs())
    save(folder, "zip-single.pt", numbers(2))
    save(folder, "zip-quantized.pt", {"weight": torch.quantize_per_tensor(numbers(4), 0.5, 0, torch.qint8)})
    legacy_with_parts(folder, "legacy-parts.pt")
    good.append("legacy-parts.pt")
    with open(os.path.join(folder, "expected.json"), "w") as file:
        json.dump({name: expected(folder, name) for name in good}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
