#!/usr/bin/env python3
"""Reference numbers for bf16 and f16 checkpoints whose expected.json has rounded rotary frequencies.

    python3 scripts/rope_reference.py tests/fixtures/falcon-40b-new-architecture tests/fixtures/persimmon

A model that was cast with `.half()` or `.bfloat16()` has its rotary frequencies rounded with the weights; one that is
loaded in such a dtype, as users do, has not. For each folder this prints how far expected.json is from transformers
with the frequencies as they are and rounded, and writes expected_float64.json: float64, frequencies as they are.
`llama_reference.py` does the same for Llama with numpy alone. Needs what `make_fixtures.py` needs.
"""

import json
import sys
from pathlib import Path

import torch
import transformers


def load(folder, rounding):
    # The default dtype is that of caches and masks, which no argument sets.
    torch.set_default_dtype(torch.float64)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, torch_dtype=torch.float64, attn_implementation="eager").eval()
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            dims = torch.arange(0, module.dim, 2) / module.dim
            module.inv_freq = (1 / module.base**dims).to(rounding).to(torch.float64)
            module._set_cos_sin_cache(module.max_position_embeddings, "cpu", torch.float64)
    return model


def main():
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    for folder in map(Path, sys.argv[1:]):
        expected = json.loads((folder / "expected.json").read_text())
        ids = expected["ids"]
        for rounding in (torch.float16, torch.bfloat16, torch.float64):
            logits = load(folder, rounding)(torch.tensor([ids]), use_cache=False).logits[0]
            logprobs = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
            by_logit = (logits[-1] - torch.tensor(expected["last_logits"])).abs().max()
            by_logprob = (logprobs - torch.tensor(expected["logprobs"])).abs().max()
            print(f"{folder.name}, frequencies in {rounding}: last_logits {by_logit:.1e}, logprobs {by_logprob:.1e}")
        exact = {"logprobs": logprobs.tolist(), "last_logits": logits[-1].tolist()}
        (folder / "expected_float64.json").write_text(json.dumps(exact) + "\n")


main()
