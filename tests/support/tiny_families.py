"""Tiny random models of many families, made by transformers.

Two layers (one more where layers take turns), odd sizes, grouped queries; biases and norms are
random as well, for zeros and ones would hide a mix-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers

VOCAB_SIZE = 131

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 128,
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 60,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OPT = {
    **{name: _COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
    "ffn_dim": 88,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "init_std": 0.2,
    "word_embed_proj_dim": 60,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


_MLA = {
    "head_dim": 8,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}


class Family(NamedTuple):
    """A model to make.

    Attributes:
        name: Prefix of transformers' classes.
        changes: Of the configuration.
        common: What most have.
        suffixes: Of configuration and model.
    """

    name: str
    changes: Mapping[str, Any] = MappingProxyType({})
    common: Mapping[str, Any] = MappingProxyType(_COMMON)
    suffixes: tuple[str, str] = ("Config", "ForCausalLM")


FAMILIES = {
    "llama": Family("Llama"),
    "llama dynamic": Family(
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "llama yarn": Family("Llama", {"rope_parameters": _YARN}),
    "qwen2": Family("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": Family(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": Family("Qwen3"),
    "mistral": Family("Mistral", {"sliding_window": None}),
    "mistral window": Family("Mistral", {"sliding_window": 12}),
    "phi3": Family(
        "Phi3",
        {
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 128,
            "sliding_window": 20,
            "hidden_size": 96,
        },
    ),
    "phi4": Family(
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": Family("Gemma", {"tie_word_embeddings": True}),
    "gemma2": Family(
        "Gemma2",
        {
            "tie_word_embeddings": True,
            "sliding_window": 12,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": Family(
        "Gemma3",
        {
            "tie_word_embeddings": True,
            "sliding_window": 12,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "rope_theta": 1000000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        suffixes=("TextConfig", "ForCausalLM"),
    ),
    "qwen3-moe": Family(
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": Family("DeepseekV2", {**_MLA, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek-v3": Family(
        "DeepseekV3",
        {
            **_MLA,
            "q_lora_rank": 24,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "opt": Family("OPT", common=_OPT),
    "opt projected": Family(
        "OPT", {"word_embed_proj_dim": 40, "do_layer_norm_before": False}, common=_OPT
    ),
    "gpt2": Family("GPT2", common=_GPT2, suffixes=("Config", "LMHeadModel")),
    "gpt-oss": Family(
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
}

FALLBACKS = {
    "stablelm": Family(
        "StableLm",
        {
            "hidden_size": 96,
            "use_qkv_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "cohere2": Family(
        "Cohere2",
        {
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "olmo2": Family("Olmo2"),
}
"""Families that have no definition of ours."""


def make_model(family: Family, **changes: Any) -> transformers.PreTrainedModel:
    """Make a model with random weights, large enough to tell logits apart."""
    config_suffix, model_suffix = family.suffixes
    config_class = getattr(transformers, family.name + config_suffix)
    model_class = getattr(transformers, family.name + model_suffix)
    config = config_class(**{**family.common, **family.changes, **changes})
    torch.manual_seed(0)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")) or "norm" in name or ".ln_" in name:
            torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return model


def save_family(name: str, folder: Path, **changes: Any) -> transformers.PreTrainedModel:
    """Make a family's model and save it to a folder."""
    model = make_model({**FAMILIES, **FALLBACKS}[name], **changes)
    model.save_pretrained(folder)
    return model
