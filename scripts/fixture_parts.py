"""What makes a fixture another one than its family's usual: config keys, tensor names, models, files.

`fixture_table.py` puts these together; `make_fixtures.py` computes and writes.
"""

import json

import torch
from safetensors.torch import save_file

FATRELU_THRESHOLD = 0.2
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# config.json


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


# tensors


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


# models that are not as they come out of the config


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


# files


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
