"""From GGUF metadata to the fields of a `ModelSpec`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from octavo_core.errors import ModelError
from octavo_core.gguf import GGUFHeader
from octavo_core.hf_config import as_ids, sliding_kinds
from octavo_core.model_family import MAX_LAYERS, family_of

# GGUF's name of an architecture, to the class name and model_type that config.json uses.
# Others keep their own name: they can be planned, and the worker refuses them by it.
GGUF_ARCHITECTURES = {
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "falcon": ("FalconForCausalLM", "falcon"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
    "gptneox": ("GPTNeoXForCausalLM", "gpt_neox"),
    "llama": ("LlamaForCausalLM", "llama"),
    "phi2": ("PhiForCausalLM", "phi"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
}

# Layers of Gemma 2 27B and Gemma 3 27B.
_WIDE_GEMMAS = {"gemma2": 46, "gemma3": 62}

_SIGMOID = 2  # of `expert_gating_func`: DeepSeek-V3, where V2 has a softmax

Get = Callable[..., Any]


def fields_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """Collect the fields of a `ModelSpec`; what the file doesn't say is None.

    Raises:
        ModelError: There is no architecture's name, or no embedding.
    """
    metadata = header.metadata
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(
            f"{header.path}: there is no general.architecture.", field="general.architecture"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{header.path}: there is no tensor token_embd.weight.")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    architecture, model_type = GGUF_ARCHITECTURES.get(name, (name, name))
    num_experts = get("expert_count") or None
    if name == "llama" and num_experts:
        architecture, model_type = "MixtralForCausalLM", "mixtral"
    if name == "deepseek2" and get("expert_gating_func") == _SIGMOID:
        architecture, model_type = "DeepseekV3ForCausalLM", "deepseek_v3"
    defaults = family_of(model_type).defaults
    eps = get("attention.layer_norm_rms_epsilon", get("attention.layer_norm_epsilon"))
    fields = {
        "architecture": architecture,
        "model_type": model_type,
        "num_hidden_layers": get("block_count"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": _largest(get("feed_forward_length")),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": eps,
        "rope_theta": get("rope.freq_base"),
        "rope_parameters": _rope(header, get, model_type),
        "hidden_act": defaults.get("hidden_act"),
        "attention_bias": defaults.get("attention_bias"),
        "rope_local_parameters": _local_rope(get, model_type),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": _eos(metadata),
        "num_experts": num_experts,
        "num_experts_per_tok": get("expert_used_count"),
    }
    fields |= _heads(get)
    if name in _WIDE_GEMMAS and get("block_count") == _WIDE_GEMMAS[name]:
        # The largest ones divide scores by the width of a head as it would be without a size of
        # its own; files don't say so.
        fields["query_pre_attn_scalar"] = get("embedding_length") / fields["num_attention_heads"]
    num_layers = fields["num_hidden_layers"]
    if isinstance(num_layers, int) and num_layers <= MAX_LAYERS:
        fields |= _attention_layers(get, num_layers, family_of(model_type).sliding_pattern)
        if num_experts:
            fields |= _experts(get, num_layers, fields["intermediate_size"])
    return fields


def _heads(get: Get) -> dict[str, Any]:
    num_heads, width = _largest(get("attention.head_count")), get("embedding_length")
    by_layer = get("attention.head_count_kv", num_heads)
    head_dim = get("attention.key_length")
    if head_dim is None and isinstance(num_heads, int) and isinstance(width, int):
        head_dim = width // max(num_heads, 1)
    fields = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": _largest(by_layer),
        "head_dim": head_dim,
        "head_dim_v": get("attention.value_length"),
    }
    if isinstance(by_layer, list) and len(set(by_layer)) > 1:
        fields["layer_num_kv_heads"] = tuple(by_layer)
    kv_lora_rank = get("attention.kv_lora_rank")
    if kv_lora_rank:
        rotary = get("rope.dimension_count", 0)
        # Files made for latent attention give the heads' own sizes apart.
        head_dim = get("attention.key_length_mla", head_dim)
        fields |= {
            "kv_lora_rank": kv_lora_rank,
            "q_lora_rank": get("attention.q_lora_rank") or None,
            "qk_rope_head_dim": rotary,
            "qk_nope_head_dim": (head_dim or 0) - rotary,
            "head_dim": head_dim,
            "head_dim_v": get("attention.value_length_mla", fields["head_dim_v"]),
            "num_key_value_heads": num_heads,
        }
    return fields


def _attention_layers(get: Get, num_layers: int, default_pattern: int) -> dict[str, Any]:
    window = get("attention.sliding_window") or None
    pattern = get("attention.sliding_window_pattern", default_pattern)
    if window is None:
        return {}
    if isinstance(pattern, list) and len(pattern) == num_layers:
        kinds = tuple("sliding" if is_sliding else "full" for is_sliding in pattern)
    elif isinstance(pattern, int) and pattern > 0:
        kinds = sliding_kinds(num_layers, pattern)
    else:
        kinds = ()
    return {"sliding_window": window, "layer_kinds": kinds}


def _experts(get: Get, num_layers: int, intermediate_size: Any) -> dict[str, Any]:
    width = get("expert_feed_forward_length") or intermediate_size
    shared = get("expert_shared_feed_forward_length")
    if shared is None:
        shared = (width or 0) * (get("expert_shared_count") or 0)
    first = get("leading_dense_block_count") or 0
    return {
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "moe_layers": tuple(range(first, num_layers)),
        "routed_scaling_factor": get("expert_weights_scale") or None,
        "norm_topk_prob": get("expert_weights_norm"),
        **_expert_groups(get),
    }


def _expert_groups(get: Get) -> dict[str, Any]:
    groups, used = get("expert_group_count"), get("expert_group_used_count")
    if not groups or groups == 1 or not used:
        return {}
    return {"n_group": groups, "topk_group": used, "topk_method": "group_limited_greedy"}


def _rope(header: GGUFHeader, get: Get, model_type: str) -> dict[str, Any]:
    context = get("rope.scaling.original_context_length", get("context_length"))
    rope: dict[str, Any] = {}
    rotary, head_dim = get("rope.dimension_count"), get("attention.key_length")
    if head_dim is None:
        head_dim = get("embedding_length", 0) // (_largest(get("attention.head_count")) or 1)
    if rotary and head_dim and rotary < head_dim and not get("attention.kv_lora_rank"):
        rope["partial_rotary_factor"] = rotary / head_dim
    if "rope_factors_long.weight" in header.tensors:
        return rope | {
            "rope_type": "longrope",
            "long_factor": _numbers(header, "rope_factors_long.weight"),
            "short_factor": _numbers(header, "rope_factors_short.weight"),
            "original_max_position_embeddings": context,
            "attention_factor": get("rope.scaling.attn_factor", 1.0),
        }
    if "rope_freqs.weight" in header.tensors:
        # Llama 3's scaling, as a factor for each frequency whatever the length.
        factors = _numbers(header, "rope_freqs.weight")
        return rope | {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": context,
            "attention_factor": 1.0,
        }
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": get("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = context
        scale = get("rope.scaling.yarn_log_multiplier")
        if scale:  # a tenth of what config.json says
            rope |= {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}
        if model_type == "gpt_oss":
            rope["truncate"] = False
    return rope


def _local_rope(get: Get, model_type: str) -> dict[str, Any]:
    """Return the rope of layers with a window, where the family has one."""
    theta = get("rope.freq_base_swa", family_of(model_type).defaults.get("rope_local_base_freq"))
    return {} if theta is None else {"rope_theta": theta}


def _numbers(header: GGUFHeader, name: str) -> list[float]:
    """Read a small tensor of float32.

    Raises:
        ModelError: It isn't there, or of another type.
    """
    info = header.tensors.get(name)
    if info is None or info.type.name != "F32":
        raise ModelError(f"{header.path}: tensor {name} must be there, as F32.", field=name)
    with header.path.open("rb") as file:
        file.seek(info.offset)
        return list(struct.unpack(f"<{info.num_bytes // 4}f", file.read(info.num_bytes)))


def _eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return as_ids([metadata.get(f"tokenizer.ggml.{key}") for key in keys])


def _largest(value: Any) -> Any:
    """Return the largest of a value for each layer, or the one value for all."""
    return max(value, default=None) if isinstance(value, list) else value
