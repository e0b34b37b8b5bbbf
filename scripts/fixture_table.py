"""The fixtures that `make_fixtures.py` makes, one entry each."""

from dataclasses import dataclass, field
from typing import Callable, Optional

import fixture_parts as parts
import torch
from fixture_parts import BF16, F16, F32, edit, renamed

VOCAB = 96


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

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

FIXTURES = {
    "opt-no-bias-no-affine": Fixture(
        "opt",
        "`enable_bias` and `layer_norm_elementwise_affine` false",
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": True},
    ),
    "opt-gelu-own-head": Fixture(
        "opt",
        "GELU (erf), `tie_word_embeddings` false",
        {"activation_function": "gelu", "tie_word_embeddings": False, "ffn_dim": 64},
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
        write=parts.legacy_bin,
    ),
    "opt-bf16-bin": Fixture(
        "opt",
        "a zip `.bin` in bf16: parameters, slices of one storage, a tied head in the embedding's, `_metadata`",
        {},
        BF16,
        write=parts.state_dict_bin,
    ),
    "falcon-alibi-multi-query-parallel": Fixture(
        "falcon",
        "ALiBi in a parallel multi-query block, twelve heads (slopes that bf16 rounds), an FFN of 2h; f16",
        {"alibi": True, "num_attention_heads": 12, "hidden_size": 48, "ffn_hidden_size": 96},
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
        "falcon",
        "rotary, a parallel block, q, k and v interleaved by head",
        {"multi_query": False, "ffn_hidden_size": 64},
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
    "falcon-rope-parameters": Fixture(
        "falcon",
        "`rope_theta` inside the newer key `rope_parameters`, f16",
        {"rope_theta": 500.0, "ffn_hidden_size": 64},
        F16,
        edit(drop=("rope_theta",), rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    ),
    "falcon-own-head": Fixture("falcon", "`tie_word_embeddings` false, f16", {"tie_word_embeddings": False}, F16),
    "falcon-old-refined-web-model": Fixture(
        "falcon",
        "the first falcon-7b config (`RefinedWebModel`), a stored copy of the tied head; bf16",
        {},
        BF16,
        edit(
            drop=("new_decoder_architecture",),
            rename=parts.REFINED_WEB_NAMES,
            model_type="RefinedWebModel",
            **parts.REFINED_WEB,
        ),
        tensors=parts.with_head,
    ),
    "falcon-old-refined-web": Fixture(
        "falcon",
        "the first falcon-40b config (`RefinedWeb`): nothing says new architecture but its name and n_head_kv",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        BF16,
        edit(
            drop=("new_decoder_architecture", "multi_query"),
            rename=parts.REFINED_WEB_NAMES,
            model_type="RefinedWeb",
            **parts.REFINED_WEB,
        ),
    ),
    "falcon-old-refined-web-alibi": Fixture(
        "falcon",
        "the first falcon-rw-1b config: `RefinedWebModel`, ALiBi, biases, sequential; bf16",
        {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        BF16,
        edit(
            drop=("new_decoder_architecture",),
            rename=parts.REFINED_WEB_NAMES,
            model_type="RefinedWebModel",
            **parts.REFINED_WEB,
        ),
    ),
    "falcon-relu-by-option": Fixture(
        "falcon",
        "as ReluFalcon-40B: ReLU that the config does not mention, f32 `.bin` shards of tensors with attributes",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "activation": "relu", "ffn_hidden_size": 64},
        F32,
        edit(drop=("activation",)),
        write=parts.two_bins_with_attributes,
        convert={"activation": "relu"},
    ),
    "phi-msft": Fixture(
        "phi",
        "the `phi-msft` config and names with a fused Wqkv, f16",
        {},
        F16,
        edit(drop=parts.PHI_NEW_KEYS, rename=parts.PHI_MSFT_NAMES, model_type="phi-msft", **parts.PHI_MSFT),
        tensors=parts.phi_msft,
    ),
    "phi-mixformer-sequential": Fixture(
        "phi",
        "the first phi-1.5 upload: sequential names, a `.bin` among files that are not weights; f16",
        {},
        F16,
        edit(
            drop=parts.PHI_NEW_KEYS,
            rename=parts.PHI_MSFT_NAMES,
            model_type="mixformer-sequential",
            architectures=["MixFormerSequentialForCausalLM"],
            architecture={"block_cls": "parallel", "mixer": {}, "mlp": {"mlp_cls": "mlp"}},
            **parts.PHI_MSFT,
        ),
        tensors=parts.phi_sequential,
        write=parts.bin_with_leftovers,
    ),
    "phi-fused-query-key-value": Fixture(
        "phi",
        "the release between: today's names, but q, k and v fused and interleaved by head; f16",
        {},
        F16,
        tensors=lambda tensors, config: parts.fuse_qkv(tensors, config, "query_key_value", interleaved=True),
    ),
    "phi-qk-layernorm": Fixture(
        "phi",
        "`qk_layernorm` true, f16",
        {"qk_layernorm": True, "intermediate_size": 64},
        F16,
        model=parts.norm_per_head,
        tensors=renamed(("layernorm.norm.", "layernorm.")),
    ),
    "phi-grouped-query": Fixture(
        "phi", "fewer key heads than heads, f16", {"num_key_value_heads": 2, "intermediate_size": 64}, F16
    ),
    "phi-f16-overflow": Fixture(
        "phi", "f16, scores beyond what f16 holds", {"intermediate_size": 64}, F16, model=parts.overflow_f16
    ),
    "phi-relu": Fixture("phi", "`hidden_act` relu", {"hidden_act": "relu", "intermediate_size": 64}),
    "phi-rope-parameters": Fixture(
        "phi",
        "`rope_theta` and `partial_rotary_factor` inside the newer key `rope_parameters`, f16",
        {"rope_theta": 500.0, "partial_rotary_factor": 0.75, "intermediate_size": 48},
        F16,
        edit(
            drop=("rope_theta", "partial_rotary_factor"),
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        ),
    ),
    "persimmon-no-qk-layernorm": Fixture(
        "persimmon",
        "`qk_layernorm` false, three quarters rotary",
        {"qk_layernorm": False, "partial_rotary_factor": 0.75, "rope_theta": 10000.0, "intermediate_size": 64},
    ),
    "persimmon-defaults": Fixture(
        "persimmon",
        "no `partial_rotary_factor`, no `rope_theta`, no `qk_layernorm`: the family's defaults; bf16 `.bin`",
        {},
        BF16,
        write=lambda folder, tensors: torch.save(tensors, folder / "pytorch_model.bin"),
    ),
    "persimmon-rope-parameters": Fixture(
        "persimmon",
        "`rope_theta` and `partial_rotary_factor` inside the newer key `rope_parameters`, f16",
        {"rope_theta": 500.0, "partial_rotary_factor": 0.75, "intermediate_size": 48},
        F16,
        edit(
            drop=("rope_theta", "partial_rotary_factor"),
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        ),
    ),
    "llama-biases": Fixture(
        "llama",
        "`attention_bias` and `mlp_bias` true, ReLU",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu"},
    ),
    # 4.44.2's Llama has no head_dim; Mistral without a window is the same model with one.
    "llama-head-dim": Fixture(
        "mistral",
        "`head_dim` other than hidden/heads, f16",
        {"head_dim": 16, "sliding_window": None},
        F16,
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
        tensors=parts.with_inv_freq,
    ),
    "llama-tied-duplicate-head": Fixture(
        "llama",
        "`tie_word_embeddings` true and a stored copy of the head; f16",
        {"tie_word_embeddings": True},
        F16,
        tensors=parts.with_head,
    ),
    "llama-bf16-rope-parameters": Fixture(
        "llama",
        "bf16; `rope_theta` inside the newer key `rope_parameters`",
        {"rope_theta": 500.0},
        BF16,
        edit(drop=("rope_theta",), rope_parameters={"rope_type": "default", "rope_theta": 500.0}, dtype="bfloat16"),
    ),
    "llama-3-rope-parameters": Fixture(
        "llama",
        "`rope_scaling` llama3 as newer releases write it, inside `rope_parameters`; f16",
        {"rope_theta": 10000.0, "rope_scaling": LLAMA3_SCALING},
        F16,
        edit(drop=("rope_theta", "rope_scaling"), rope_parameters=LLAMA3_SCALING | {"rope_theta": 10000.0}),
    ),
    "llama-mixed-dtypes": Fixture(
        "llama",
        "f32, bf16 and f16 tensors in two shards",
        {"hidden_act": "relu"},
        F32,
        model=parts.round_mixed,
        tensors=parts.mixed_dtypes,
        write=parts.shards("model", "safetensors", parts.save_safetensors),
    ),
    # transformers has no fatrelu.
    "sparsellama-fatrelu": Fixture(
        "llama",
        f"`sparsellama` with `fatrelu`; the threshold is {parts.FATRELU_THRESHOLD}, so that it matters",
        {"hidden_act": "fatrelu"},
        F32,
        edit(
            model_type="sparsellama", architectures=["SparseLlamaForCausalLM"], hidden_act_param=parts.FATRELU_THRESHOLD
        ),
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
        "a window of 8 tokens in the layers from `max_window_layers` on, f16",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        F16,
        model=parts.window_upper_layers,
    ),
}
