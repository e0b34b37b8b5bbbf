#!/usr/bin/env python3
"""Tiny predictors as PowerInfer and Deja Vu store them, for two of the fixtures, and whom they select.

    python3 scripts/import_predictors.py      # writes tests/imported_predictors

Needs what `make_fixtures.py` needs. The matrices are random. `expected.json` of a folder has the fixture's name, ids, what
`wick convert` needs, the input and what lies between the matrices, and for each layer and token the ids of the selected
neurons, in a model that leaves all others out: what a layer selects depends on what those before it have left out. The first
seed is taken of which no score lies within MARGIN of the threshold, so any order of summation selects the same.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent / "tests"
IDS = 12
MARGIN = 5e-5


@dataclass
class Case:
    fixture: str
    # Deja Vu's files are called after what they reached.
    names: str
    keys: tuple
    relu: bool
    input: str
    dtype: torch.dtype = torch.float32
    threshold: float = None
    activation: str = None


CASES = {
    "powerinfer-opt": Case(
        "opt-pre-ln", "model_{}.pt", ("fc1.weight", "fc2.weight"), True, "attention_residual", threshold=0.125
    ),
    "deja-vu-opt": Case(
        "opt-pre-ln", "c4_layer{}_0.97-0.41.pt", ("0.weight", "1.weight"), False, "attention_residual", torch.float16
    ),
    "powerinfer-falcon": Case(
        "falcon-relu-by-option", "model_{}.pt", ("fc1.weight", "fc2.weight"), True, "layer_input", torch.bfloat16,
        activation="relu",
    ),
}


def load(case):
    folder = ROOT / "fixtures" / case.fixture
    config = transformers.AutoConfig.from_pretrained(folder)
    if case.activation:
        config.activation = case.activation
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    state = {}
    for path in sorted(folder.glob("*.bin")):
        state |= torch.load(path)
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    model.load_state_dict(state, strict=False)  # a tied head may be missing; the logits tell whether more is
    model.tie_weights()
    expected = json.loads((folder / "expected.json").read_text())
    logits = model(torch.tensor([expected["ids"]])).logits[0, -1]
    assert (logits - torch.tensor(expected["last_logits"])).abs().max() < 1e-3, "another model than the fixture"
    return model, expected["ids"][:IDS]


def parts(model, case):
    """For each layer: the module whose first argument the predictor sees, and the matrix that decides."""
    if case.fixture.startswith("opt"):
        return [(layer.final_layer_norm, layer.fc1) for layer in model.model.decoder.layers]
    return [(layer, layer.mlp.dense_h_to_4h) for layer in model.transformer.h]


def predictors(layers, case, seed):
    """Scores of the size of 1, and a rank for each layer."""
    torch.manual_seed(seed)
    made = []
    for number, (_, decides) in enumerate(layers):
        neurons, hidden = decides.weight.shape
        rank = 4 + number
        down = torch.randn(rank, hidden) / hidden**0.5
        up = torch.randn(neurons, rank) / rank**0.5
        made.append((down.to(case.dtype), up.to(case.dtype)))
    return made


def select(model, case, made, ids):
    """Whom each layer selects, and how near to the threshold a score comes."""
    threshold = case.threshold or 0.0
    selected, nearest, hooks = [None] * len(made), [float("inf")], []
    for number, ((seen, decides), (down, up)) in enumerate(zip(parts(model, case), made)):
        state = {}

        def see(_, arguments, state=state):
            state["input"] = arguments[0]

        def mask(_, arguments, output, number=number, down=down, up=up, state=state):
            hidden = state["input"].reshape(-1, down.shape[1]) @ down.float().T
            scores = (hidden.relu() if case.relu else hidden) @ up.float().T
            nearest[0] = min(nearest[0], (scores - threshold).abs().min().item())
            wanted = scores >= threshold
            selected[number] = [row.nonzero().flatten().tolist() for row in wanted]
            return output * wanted.reshape(output.shape)

        hooks += [seen.register_forward_pre_hook(see), decides.register_forward_hook(mask)]
    model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return selected, nearest[0]


def write(name, case):
    model, ids = load(case)
    for seed in range(500):
        made = predictors(parts(model, case), case, seed)
        selected, nearest = select(model, case, made, ids)
        if nearest >= MARGIN:
            break
    else:
        raise SystemExit(f"{name}: no seed keeps all scores {MARGIN} from the threshold")
    folder = ROOT / "imported_predictors" / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, tensors in enumerate(made):
        torch.save(dict(zip(case.keys, tensors)), folder / case.names.format(number))
    if case.threshold is not None:
        (folder / "config.json").write_text(json.dumps({"sparse_threshold": case.threshold}) + "\n")
    expected = {
        "fixture": case.fixture, "ids": ids, "input": case.input, "between": "relu" if case.relu else "none",
        "ranks": [down.shape[0] for down, _ in made], "selected": selected,
    }
    if case.activation:
        expected["convert"] = {"activation": case.activation}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    share = sum(map(len, sum(selected, []))) / (len(ids) * sum(up.shape[0] for _, up in made))
    print(f"{name}: {size / 1024:.0f} KiB, seed {seed}, margin {nearest:.1e}, {100 * share:.0f} % selected")


def main():
    transformers.logging.set_verbosity_error()
    with torch.no_grad():
        for name, case in CASES.items():
            write(name, case)
        # For a layer of opt-pre-ln, with matrices that do not fit each other.
        wrong = {"fc1.weight": torch.ones(5, 64).half(), "fc2.weight": torch.ones(256, 6).half()}
        torch.save(wrong, ROOT / "imported_predictors" / "wrong-rank.pt")


main()
