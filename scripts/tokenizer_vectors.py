#!/usr/bin/env python3
"""Checks the tokenizers that `wick convert` makes against the vocabularies that come with llama.cpp.

Fetches the source distribution of llama-cpp-python with pip (50 MB), takes its vocabularies, sample texts and the ids
that each model's original tokenizer gives, writes them in the form that the test reads, and runs the test. From the
repository's root:

    scripts/tokenizer_vectors.py [FOLDER]

FOLDER (default: a temporary one) keeps the download for the next run. Needs Python 3.8 with pip, and cargo.
"""

import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.16"
VOCABULARY = re.compile(r"/vendor/llama\.cpp/models/ggml-vocab-([^/]+)\.gguf(\.inp|\.out)?$")
TEST = "vocabularies_give_the_ids_of_their_original_tokenizers"

# GGUF value types with a fixed size.
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
# Keys of `tokenizer.ggml` whose names differ from the fields of the test's vocabulary.
FIELDS = {"token_type": "token_types"}


class Gguf:
    """The metadata of a GGUF file, version 2 or 3."""

    def __init__(self, data):
        self.data, self.at = data, 0
        if self.take(4) != b"GGUF":
            raise ValueError("no GGUF file")
        version, _tensors, count = self.number("<I"), self.number("<Q"), self.number("<Q")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version}")
        self.values = {self.string(): self.value(self.number("<I")) for _ in range(count)}

    def take(self, count):
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form):
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self):
        return self.take(self.number("<Q")).decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            of, count = self.number("<I"), self.number("<Q")
            return [self.value(of) for _ in range(count)]
        return self.number(NUMBERS[kind])


def download(folder):
    """The package's archive, fetched once."""
    found = list(folder.glob("llama_cpp_python-*.tar.gz"))
    if not found:
        # Only this package as source: its build tools as wheels, or pip compiles cmake.
        only = ["--no-deps", "--no-binary", PACKAGE.split("==")[0]]
        subprocess.run([sys.executable, "-m", "pip", "download", *only, "-d", str(folder), PACKAGE], check=True)
        found = list(folder.glob("llama_cpp_python-*.tar.gz"))
    return found[0]


def extract(archive, folder):
    """Writes samples as they are and vocabularies as JSON; returns these by name."""
    vocabularies = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            match = VOCABULARY.search(member.name)
            if not match:
                continue
            name, ending = match.groups()
            data = tar.extractfile(member).read()
            if ending:
                (folder / (name + ending)).write_bytes(data)
                continue
            values = Gguf(data).values
            vocab = {"architecture": values.get("general.architecture", "")}
            for key, value in values.items():
                if key.startswith("tokenizer.ggml."):
                    key = key[len("tokenizer.ggml.") :]
                    vocab[FIELDS.get(key, key)] = value
            (folder / f"{name}.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
            vocabularies[name] = vocab
    return vocabularies


def byte_level_checkpoint(vocab, folder):
    """The same vocabulary as vocab.json and merges.txt."""
    folder.mkdir(exist_ok=True)
    ids = {token: number for number, token in enumerate(vocab["tokens"])}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *vocab["merges"], ""])
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    settings = {"tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def varint(number):
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def message(tag, data):
    return varint(tag << 3 | 2) + varint(len(data)) + data


def sentencepiece_checkpoint(vocab, folder):
    """The same vocabulary as tokenizer.model: pieces (1), TrainerSpec (2) with model_type BPE and byte_fallback."""
    folder.mkdir(exist_ok=True)
    model = bytearray()
    for token, score, kind in zip(vocab["tokens"], vocab["scores"], vocab["token_types"]):
        text = message(1, token.encode())
        model += message(1, text + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind))
    model += message(2, varint(3 << 3) + varint(2) + varint(35 << 3) + varint(1))
    (folder / "tokenizer.model").write_bytes(model)


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    vocabularies = extract(download(folder), folder)
    byte_level_checkpoint(vocabularies["gpt-2"], folder / "gpt-2")
    sentencepiece_checkpoint(vocabularies["llama-spm"], folder / "llama-spm")
    test = ["cargo", "test", "--release", "--workspace", "--lib", TEST, "--", "--ignored", "--nocapture"]
    os.environ["WICK_TOKENIZER_VECTORS"] = str(folder)
    sys.exit(subprocess.run(test).returncode)


if __name__ == "__main__":
    main()
