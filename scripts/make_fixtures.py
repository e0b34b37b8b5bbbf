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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

import torch
import transformers
from safetensors.torch import save_file
from transformers.activations import ACT2FN

ROOT = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
VOCAB, PROMPT, GREEDY = 96, 24, 24
MARGIN = 0.05
FATRELU_THRESHOLD = 0.2
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass
class Fixture:
    """One folder. `config` is what transformers computes with, and config.json unless `stored` makes another."""

    family: str
    purpose: str
    config: dict = field(default_factory=dict)
    dtype: torch.dtype = F32
    # config.json from the full config.
    stored: Callable = lambda config: config
    # Applied to the f32 model once its weights are drawn.
    model: Callable = lambda model: None
    # Stored tensors from the state dict, and the files from these.
    tensors: Callable = lambda tensors, config: tensors
    write: Optional[Callable] = None
    # Options that `wick convert` needs.
    convert: dict = field(default_factory=dict)


# --- families ------------------------------------------------------------------------------------------------------

COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = COMMON | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "opt": (
        "OPTForCausalLM",
        COMMON
        | {
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
            "ffn_dim": 96,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
            "activation_function": "relu",
            "do_layer_norm_before": True,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        COMMON
        | {
            "bos_token_id": 11,
            "eos_token_id": 11,
            "alibi": False,
            "bias": False,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "phi": (
        "PhiForCausalLM",
        COMMON
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "intermediate_size": 128,
            "hidden_act": "gelu_new",
            "max_position_embeddings": 64,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
        },
    ),
    "persimmon": (
        "PersimmonForCausalLM",
        COMMON
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "intermediate_size": 96,
            "hidden_act": "relu2",
            "max_position_embeddings": 64,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
}


# --- config.json ---------------------------------------------------------------------------------------------------


def edit(drop=(), rename=None, **changes):
    """config.json with keys dropped, renamed, and set."""

    def stored(config):
        rename_to = rename or {}
        return {rename_to.get(key, key): value for key, value in config.items() if key not in drop} | changes

    return stored


# The configs of the first Falcon uploads: code in the repository, other key names, nothing that was not yet a choice.
REFINED_WEB_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"}
REFINED_WEB = {
    "architectures": ["RWForCausalLM"],
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}
# What Phi's configs were before transformers had the model.
PHI_MSFT_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
PHI_MSFT = {
    "n_head_kv": None,
    "n_inner": None,
    "rotary_dim": 4,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.1,
    "flash_attn": False,
    "flash_rotary": False,
    "fused_dense": False,
    "initializer_range": 0.02,
}
PHI_NEW_KEYS = ("intermediate_size", "partial_rotary_factor")


# --- tensors -------------------------------------------------------------------------------------------------------


def renamed(*pairs):
    """Names with each `(old, new)` replaced, one after the other."""

    def tensors(tensors, _config):
        out = {}
        for name, tensor in tensors.items():
            for old, new in pairs:
                name = name.replace(old, new)
            out[name] = tensor
        return out

    return tensors


def with_head(tensors, _config):
    """A stored copy of a tied head."""
    embedding = next(tensor for name, tensor in tensors.items() if "embed" in name)
    return tensors | {"lm_head.weight": embedding.clone()}


def with_inv_freq(tensors, config):
    """The rotary frequencies that old Llama files hold."""
    dim = config["hidden_size"] // config["num_attention_heads"]
    inv_freq = 1 / 10000 ** (torch.arange(0, dim, 2) / dim)
    layers = range(config["num_hidden_layers"])
    return tensors | {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": inv_freq.clone() for n in layers}


def fuse_qkv(tensors, config, name, interleaved):
    """q, k and v as one tensor: all q rows, all k rows, all v rows; or each head's three together."""
    heads = config["num_attention_heads"]
    out = {}
    for key, tensor in tensors.items():
        if ".q_proj." in key:
            parts = [tensor] + [tensors[key.replace("q_proj", part)] for part in ("k_proj", "v_proj")]
            if interleaved:
                rows = [part.unflatten(0, (heads, -1)) for part in parts]
                fused = torch.stack(rows, 1).flatten(0, 2)
            else:
                fused = torch.cat(parts)
            out[key.replace("q_proj", name)] = fused
        elif ".k_proj." not in key and ".v_proj." not in key:
            out[key] = tensor
    return out


def phi_msft(tensors, config):
    tensors = fuse_qkv(tensors, config, "Wqkv", interleaved=False)
    return renamed(
        ("model.embed_tokens", "transformer.embd.wte"),
        ("lm_head", "lm_head.linear"),
        ("model.final_layernorm", "lm_head.ln"),
        ("model.layers", "transformer.h"),
        ("input_layernorm", "ln"),
        ("self_attn.dense", "mixer.out_proj"),
        ("self_attn", "mixer"),
    )(tensors, config)


def phi_sequential(tensors, config):
    """The names of one `nn.Sequential`: the embedding is its part 0, the head its last."""
    last = config["num_hidden_layers"] + 1
    out = {}
    for name, tensor in phi_msft(tensors, config).items():
        name = name.replace("transformer.embd", "layers.0").replace("lm_head", f"layers.{last}")
        if name.startswith("transformer.h."):
            layer, rest = name[len("transformer.h.") :].split(".", 1)
            name = f"layers.{int(layer) + 1}.{rest}"
        out[name] = tensor
    return out


def mixed_dtypes(tensors, _config):
    """f32, bf16 and f16 by turns, as rounded by `round_mixed` before."""
    return {name: tensor.to(MIXED[index % 3]) for index, (name, tensor) in enumerate(tensors.items())}


MIXED = [F32, BF16, F16]


# --- models that are not as they come out of the config ------------------------------------------------------------


def round_mixed(model):
    for index, parameter in enumerate(model.state_dict().values()):
        parameter.copy_(parameter.to(MIXED[index % 3]))


def overflow_f16(model):
    """Queries and keys so long that q.k is more than f16 holds."""
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.weight.mul_(128)
            linear.bias.mul_(128)


class PerHead(torch.nn.Module):
    """A norm over each head's part of the last dimension."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        heads = x.unflatten(-1, (-1, self.norm.normalized_shape[0]))
        return self.norm(heads).flatten(-2)


def norm_per_head(model):
    """4.44.2 gives Phi's q/k norms all heads at once and fails; newer releases split the heads first."""
    for layer in model.model.layers:
        layer.self_attn.q_layernorm = PerHead(layer.self_attn.q_layernorm)
        layer.self_attn.k_layernorm = PerHead(layer.self_attn.k_layernorm)


def window_upper_layers(model):
    """4.44.2 has Qwen2's window in flash attention alone; newer releases have it in every implementation, in the
    layers from `max_window_layers` on."""
    window = model.config.sliding_window
    for layer in model.model.layers[model.config.max_window_layers :]:

        def windowed(hidden, attention_mask, whole=layer.forward, **options):
            left = torch.ones(attention_mask.shape[-2:]).tril(-window).bool()
            return whole(hidden, attention_mask=attention_mask.masked_fill(left, -torch.inf), **options)

        layer.forward = windowed


class FatRelu(torch.nn.Module):
    def forward(self, x):
        return torch.where(x > FATRELU_THRESHOLD, x, torch.zeros_like(x))


# --- files ---------------------------------------------------------------------------------------------------------


def save_safetensors(tensors, path):
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def safetensors(folder, tensors):
    save_safetensors(tensors, folder / "model.safetensors")


def halves(tensors):
    names = list(tensors)
    middle = len(names) // 2
    return [{name: tensors[name] for name in part} for part in (names[:middle], names[middle:])]


def shards(stem, extension, save):
    """Two files and their index."""

    def write(folder, tensors):
        weight_map = {}
        for number, part in enumerate(halves(tensors), 1):
            file = f"{stem}-{number:05}-of-00002.{extension}"
            save(part, folder / file)
            weight_map |= {name: file for name in part}
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.{extension}.index.json").write_text(json.dumps(index, indent=1) + "\n")

    return write


def biases_in_one_storage(tensors):
    biases = {name: tensor for name, tensor in tensors.items() if name.endswith(".bias")}
    slices = torch.cat(list(biases.values())).split([bias.numel() for bias in biases.values()])
    return tensors | dict(zip(biases, slices))


def legacy_bin(folder, tensors):
    """The format before the zip archives, with slices of one storage."""
    tensors = biases_in_one_storage(tensors)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def state_dict_bin(folder, tensors):
    """A zip archive as `state_dict()` and training scripts leave it: an ordered dict with `_metadata`, parameters,
    slices of one storage, and a tied head in the embedding's storage."""
    state = torch.nn.Linear(1, 1).state_dict()
    state.clear()
    for name, tensor in biases_in_one_storage(tensors).items():
        state[name] = torch.nn.Parameter(tensor, requires_grad=False) if "fc1" in name else tensor
    state["lm_head.weight"] = state["model.decoder.embed_tokens.weight"]
    torch.save(state, folder / "pytorch_model.bin")


def two_bins_with_attributes(folder, tensors):
    """Shards whose tensors have attributes, which newer torch pickles through `_rebuild_from_type_v2`."""

    def reduce(tensor, protocol):
        parts = tensor._reduce_ex_internal(protocol)
        return torch._tensor._rebuild_from_type_v2, (parts[0], torch.Tensor, parts[1], {"note": "relu"})

    torch.Tensor.__reduce_ex__, plain = reduce, torch.Tensor.__reduce_ex__
    shards("pytorch_model", "bin", torch.save)(folder, tensors)
    torch.Tensor.__reduce_ex__ = plain


def bin_with_leftovers(folder, tensors):
    """A `.bin` among files that are not weights to load."""
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save({"step": 7, "state": {0: {"exp_avg": torch.ones(3)}}}, folder / "optimizer.pt")
    (folder / "flax_model.msgpack").write_bytes(b"\x80")
    (folder / "tf_model.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}\n')


# --- the table -----------------------------------------------------------------------------------------------------

FIXTURES = {
    "opt-no-bias-no-affine": Fixture(
        "opt",
        "`enable_bias` and `layer_norm_elementwise_affine` false",
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": True},
    ),
    "opt-gelu-own-head": Fixture(
        "opt", "GELU (erf), `tie_word_embeddings` false", {"activation_function": "gelu", "tie_word_embeddings": False}
    ),
    "opt-no-final-norm": Fixture(
        "opt", "`_remove_final_layer_norm` true, f16", {"_remove_final_layer_norm": True}, F16
    ),
    "opt-post-ln-unprojected": Fixture(
        "opt", "post-LN as opt-350m, but embeddings as wide as the model; f16", {"do_layer_norm_before": False}, F16
    ),
    "opt-pre-ln-projected": Fixture(
        "opt", "pre-LN with project_in and project_out, f16", {"word_embed_proj_dim": 16}, F16
    ),
    "opt-legacy-f16-bin": Fixture(
        "opt",
        "a `.bin` from before the zip archives, `decoder.` names, slices of one storage, fewer keys in the config",
        {},
        F16,
        edit(drop=("word_embed_proj_dim",)),
        tensors=renamed(("model.decoder.", "decoder.")),
        write=legacy_bin,
    ),
    "opt-bf16-bin": Fixture(
        "opt",
        "a zip `.bin` in bf16: parameters, slices of one storage, a tied head in the embedding's, `_metadata`",
        {},
        BF16,
        write=state_dict_bin,
    ),
    "falcon-alibi-multi-query-parallel": Fixture(
        "falcon",
        "ALiBi in a parallel multi-query block, six heads (slopes that bf16 rounds), an FFN of 2h; f16",
        {"alibi": True, "num_attention_heads": 6, "hidden_size": 48, "ffn_hidden_size": 96},
        F16,
    ),
    "falcon-alibi-new-architecture": Fixture(
        "falcon",
        "ALiBi in the new decoder architecture, f16",
        {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
        F16,
    ),
    "falcon-bias-multi-query": Fixture("falcon", "the 7B shape with biases, f16", {"bias": True}, F16),
    "falcon-multi-head-parallel": Fixture(
        "falcon", "rotary, a parallel block, q, k and v interleaved by head", {"multi_query": False}
    ),
    "falcon-multi-head-sequential-bias": Fixture(
        "falcon",
        "rotary, a sequential block with biases, q, k and v interleaved by head; f16",
        {"multi_query": False, "parallel_attn": False, "bias": True},
        F16,
    ),
    "falcon-multi-query-sequential": Fixture(
        "falcon",
        "rotary, a sequential multi-query block, an FFN of 3h",
        {"parallel_attn": False, "ffn_hidden_size": 96},
    ),
    "falcon-alibi-multi-query-sequential": Fixture(
        "falcon",
        "ALiBi, a sequential multi-query block without biases; f16",
        {"alibi": True, "parallel_attn": False},
        F16,
    ),
    "falcon-alibi-multi-head-parallel": Fixture(
        "falcon",
        "ALiBi, a parallel block, q, k and v interleaved by head; f16",
        {"alibi": True, "multi_query": False},
        F16,
    ),
    "falcon-new-architecture-one-norm": Fixture(
        "falcon",
        "grouped queries and one norm, as falcon-11B; bf16",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        BF16,
    ),
    "falcon-new-architecture-multi-head": Fixture(
        "falcon",
        "the new architecture with as many key heads as heads, biases; f16",
        {"new_decoder_architecture": True, "num_kv_heads": 4, "bias": True},
        F16,
    ),
    "falcon-rope-linear": Fixture(
        "falcon", "`rope_scaling` linear, f16", {"rope_scaling": {"type": "linear", "factor": 4.0}}, F16
    ),
    "falcon-own-head": Fixture("falcon", "`tie_word_embeddings` false, f16", {"tie_word_embeddings": False}, F16),
    "falcon-old-refined-web-model": Fixture(
        "falcon",
        "the first falcon-7b config (`RefinedWebModel`), a stored copy of the tied head; bf16",
        {},
        BF16,
        edit(drop=("new_decoder_architecture",), rename=REFINED_WEB_NAMES, model_type="RefinedWebModel", **REFINED_WEB),
        tensors=with_head,
    ),
    "falcon-old-refined-web": Fixture(
        "falcon",
        "the first falcon-40b config (`RefinedWeb`): nothing says new architecture but its name and n_head_kv",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        BF16,
        edit(
            drop=("new_decoder_architecture", "multi_query"),
            rename=REFINED_WEB_NAMES,
            model_type="RefinedWeb",
            **REFINED_WEB,
        ),
    ),
    "falcon-old-refined-web-alibi": Fixture(
        "falcon",
        "the first falcon-rw-1b config: `RefinedWebModel`, ALiBi, biases, sequential; bf16",
        {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        BF16,
        edit(drop=("new_decoder_architecture",), rename=REFINED_WEB_NAMES, model_type="RefinedWebModel", **REFINED_WEB),
    ),
    "falcon-relu-by-option": Fixture(
        "falcon",
        "as ReluFalcon-40B: ReLU that the config does not mention, f32 `.bin` shards of tensors with attributes",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "activation": "relu", "ffn_hidden_size": 64},
        F32,
        edit(drop=("activation",)),
        write=two_bins_with_attributes,
        convert={"activation": "relu"},
    ),
    "phi-msft": Fixture(
        "phi",
        "the `phi-msft` config and names with a fused Wqkv, f16",
        {},
        F16,
        edit(drop=PHI_NEW_KEYS, rename=PHI_MSFT_NAMES, model_type="phi-msft", **PHI_MSFT),
        tensors=phi_msft,
    ),
    "phi-mixformer-sequential": Fixture(
        "phi",
        "the first phi-1.5 upload: sequential names, a `.bin` among files that are not weights; f16",
        {},
        F16,
        edit(
            drop=PHI_NEW_KEYS,
            rename=PHI_MSFT_NAMES,
            model_type="mixformer-sequential",
            architectures=["MixFormerSequentialForCausalLM"],
            architecture={"block_cls": "parallel", "mixer": {}, "mlp": {"mlp_cls": "mlp"}},
            **PHI_MSFT,
        ),
        tensors=phi_sequential,
        write=bin_with_leftovers,
    ),
    "phi-fused-query-key-value": Fixture(
        "phi",
        "the release between: today's names, but q, k and v fused and interleaved by head; f16",
        {},
        F16,
        tensors=lambda tensors, config: fuse_qkv(tensors, config, "query_key_value", interleaved=True),
    ),
    "phi-qk-layernorm": Fixture(
        "phi",
        "`qk_layernorm` true, f16",
        {"qk_layernorm": True, "intermediate_size": 64},
        F16,
        model=norm_per_head,
        tensors=renamed(("layernorm.norm.", "layernorm.")),
    ),
    "phi-grouped-query": Fixture(
        "phi", "fewer key heads than heads", {"num_key_value_heads": 2, "intermediate_size": 64}
    ),
    "phi-f16-overflow": Fixture(
        "phi", "f16, scores beyond what f16 holds", {"intermediate_size": 64}, F16, model=overflow_f16
    ),
    "phi-relu": Fixture("phi", "`hidden_act` relu", {"hidden_act": "relu", "intermediate_size": 96}),
    "persimmon-no-qk-layernorm": Fixture(
        "persimmon",
        "`qk_layernorm` false, three quarters rotary",
        {"qk_layernorm": False, "partial_rotary_factor": 0.75, "rope_theta": 10000.0},
    ),
    "persimmon-defaults": Fixture(
        "persimmon",
        "no `partial_rotary_factor`, no `rope_theta`, no `qk_layernorm`: the family's defaults; bf16 `.bin`",
        {},
        BF16,
        write=lambda folder, tensors: torch.save(tensors, folder / "pytorch_model.bin"),
    ),
    "llama-biases": Fixture(
        "llama",
        "`attention_bias` and `mlp_bias` true, ReLU",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu"},
    ),
    # 4.44.2's Llama has no head_dim; Mistral without a window is the same model with one.
    "llama-head-dim": Fixture(
        "mistral",
        "`head_dim` other than hidden/heads",
        {"head_dim": 16, "sliding_window": None},
        stored=edit(drop=("sliding_window",), model_type="llama", architectures=["LlamaForCausalLM"]),
    ),
    "llama-rope-linear": Fixture(
        "llama",
        "`rope_scaling` linear by its old key `type`, f16",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        F16,
    ),
    "llama-rope-dynamic": Fixture(
        "llama",
        "`rope_scaling` dynamic inside `max_position_embeddings`, where it changes nothing; both `type` and `rope_type`; f16",
        {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0}},
        F16,
    ),
    "llama-gelu": Fixture(
        "llama", "`hidden_act` gelu, multi-query; f16", {"hidden_act": "gelu", "num_key_value_heads": 1}, F16
    ),
    "llama-oldest": Fixture(
        "llama",
        "an early file: stored inv_freq, and a config without num_key_value_heads, rope_theta, tie_word_embeddings",
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-6},
        F16,
        edit(drop=("num_key_value_heads", "tie_word_embeddings"), initializer_range=0.02, max_sequence_length=64),
        tensors=with_inv_freq,
    ),
    "llama-tied-duplicate-head": Fixture(
        "llama",
        "`tie_word_embeddings` true and a stored copy of the head; f16",
        {"tie_word_embeddings": True},
        F16,
        tensors=with_head,
    ),
    "llama-bf16-rope-parameters": Fixture(
        "llama",
        "bf16; `rope_theta` inside the newer key `rope_parameters`",
        {"rope_theta": 500.0},
        BF16,
        edit(drop=("rope_theta",), rope_parameters={"rope_type": "default", "rope_theta": 500.0}, dtype="bfloat16"),
    ),
    "llama-mixed-dtypes": Fixture(
        "llama",
        "f32, bf16 and f16 tensors in two shards",
        {"hidden_act": "relu"},
        F32,
        model=round_mixed,
        tensors=mixed_dtypes,
        write=shards("model", "safetensors", save_safetensors),
    ),
    # transformers has no fatrelu.
    "sparsellama-fatrelu": Fixture(
        "llama",
        f"`sparsellama` with `fatrelu`; the threshold is {FATRELU_THRESHOLD}, so that it matters",
        {"hidden_act": "fatrelu"},
        F32,
        edit(model_type="sparsellama", architectures=["SparseLlamaForCausalLM"], hidden_act_param=FATRELU_THRESHOLD),
    ),
    "mistral-sliding-window": Fixture("mistral", "a window of 8 tokens", {"sliding_window": 8}),
    "mistral-no-window": Fixture("mistral", "`sliding_window` null, f16", {"sliding_window": None}, F16),
    "qwen2": Fixture(
        "qwen2",
        "biases at q, k and v alone, a window that is switched off; f16",
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        F16,
    ),
    "qwen2-sliding-window": Fixture(
        "qwen2",
        "a window of 8 tokens in the layers from `max_window_layers` on",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        model=window_upper_layers,
    ),
}


# --- computing -----------------------------------------------------------------------------------------------------


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
    (fixture.write or safetensors)(folder, tensors)
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
    ACT2FN["fatrelu"] = FatRelu
    with torch.no_grad():
        for name in sys.argv[1:] or FIXTURES:
            make(name, FIXTURES[name])


main()
