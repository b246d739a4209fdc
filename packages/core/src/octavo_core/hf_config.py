"""From the many spellings of config.json to the fields of a `ModelSpec`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo_core.errors import ModelError
from octavo_core.model_family import MAX_LAYERS, family_of
from octavo_core.quantization import quantization_from_config

logger = logging.getLogger(__name__)

# A multimodal model keeps its language model's sizes under one of these.
_NESTED = ("text_config", "llm_config", "language_config")

# Our name, which is transformers' usual one, and what else it is called.
_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length", "seq_length"),
    "rms_norm_eps": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"),
    "hidden_act": ("hidden_activation", "activation_function"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "experts_per_token", "moe_top_k"),
}

_MAX_SHOWN = 60  # characters of a wrong entry in an error

_COPIED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "word_embed_proj_dim",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "topk_method",
    "rope_interleave",
    "do_layer_norm_before",
    "scale_attn_by_inverse_layer_idx",
    "type_vocab_size",
    "swiglu_alpha",
    "swiglu_limit",
)

# Kinds of rope that look back at the context of the time before they were stretched.
_STRETCHED = ("longrope", "yarn", "llama3")

# Families that count positions from behind the number of the padding token.
_POSITIONS_AFTER_PAD = ("roberta", "xlm-roberta", "camembert")

_LAYER_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    # A state of one size whatever the length, which is no KV cache.
    "linear_attention": "none",
    "mamba": "none",
    "conv": "none",
}


def fields_from_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Collect the fields of a `ModelSpec`; what the files don't say is left out or None.

    Reads the old and the new spelling of keys that transformers renamed
    (``torch_dtype``/``dtype``, ``rope_scaling``/``rope_parameters``), the names that other
    families use (``n_embd``, ``num_local_experts``), and a nested ``text_config``.

    Args:
        config: Contents of config.json.
        generation_config: Contents of generation_config.json.

    Raises:
        ModelError: An entry has a wrong type, or ``layer_types`` does not name each layer.
    """
    flat = _flatten(config)
    get = _reader(flat)
    fields: dict[str, Any] = {name: get(name) for name in _COPIED}
    architectures = config.get("architectures") or flat.get("architectures")
    if not isinstance(architectures, list) or not isinstance(_first(architectures), str):
        raise _wrong_type("architectures", architectures, "a list with the name of a class")
    rope, rope_theta, local_rope = _rope(flat, get)
    eos = generation_config.get("eos_token_id", flat.get("eos_token_id"))
    fields |= {
        "architecture": architectures[0],
        "model_type": flat.get("model_type"),
        "rope_theta": rope_theta,
        "rope_parameters": rope,
        "rope_local_parameters": local_rope,
        "dtype": _dtype(config, flat),
        "bos_token_id": _first(flat.get("bos_token_id")),
        "eos_token_ids": as_ids(eos),
        "quantization": quantization_from_config(config) or quantization_from_config(flat),
    }
    if flat.get("model_type") in _POSITIONS_AFTER_PAD:
        fields["position_offset"] = flat["pad_token_id"] + 1
    fields |= _heads(get)
    num_layers = fields["num_hidden_layers"]
    if isinstance(num_layers, int) and num_layers <= MAX_LAYERS:
        fields |= _experts(flat, get, num_layers)
        fields |= _attention_layers(flat, num_layers)
    if get("kv_lora_rank") is not None:
        fields["head_dim_v"] = flat.get("v_head_dim")
    if fields["intermediate_size"] is None:
        # GPT-2 leaves out what is four times the width; a pure mixture has experts only.
        width, fallback = get("hidden_size"), fields.get("moe_intermediate_size")
        if family_of(str(flat.get("model_type"))).gated_mlp:
            fields["intermediate_size"] = fallback
        elif isinstance(width, int):
            fields["intermediate_size"] = 4 * width
    return fields


def as_ids(value: Any) -> tuple[int, ...]:
    """Return ids as a tuple without repeats; accepts None, one id or a list."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if item is not None))


def sliding_kinds(num_layers: int, pattern: int) -> tuple[str, ...]:
    """Name each layer's kind where every `pattern`-th attends to all; 0 means none does."""
    return tuple(
        "full" if pattern and (index + 1) % pattern == 0 else "sliding"
        for index in range(num_layers)
    )


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a nested language model's entries over the outer ones, and those over the defaults."""
    flat = dict(config)
    for name in _NESTED:
        nested = config.get(name)
        if isinstance(nested, Mapping):
            flat |= {key: value for key, value in nested.items() if value is not None}
    defaults = family_of(str(flat.get("model_type"))).defaults
    # A key that is there, if only as null, is the file's own word.
    missing = {key: value for key, value in defaults.items() if not _has(flat, key)}
    return {**flat, **missing}


def _has(flat: Mapping[str, Any], key: str) -> bool:
    return key in flat or any(alias in flat for alias in _ALIASES.get(key, ()))


def _reader(flat: Mapping[str, Any]) -> Any:
    def get(name: str) -> Any:
        for key in (name, *_ALIASES.get(name, ())):
            if flat.get(key) is not None:
                return flat[key]
        return None

    return get


def _heads(get: Any) -> dict[str, Any]:
    num_heads, width = get("num_attention_heads"), get("hidden_size")
    num_kv_heads = get("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = num_heads
    if get("multi_query") is True and not get("new_decoder_architecture"):
        num_kv_heads = 1
    head_dim = get("head_dim")
    if get("kv_lora_rank") is not None and get("qk_nope_head_dim") is not None:
        head_dim = get("qk_nope_head_dim") + (get("qk_rope_head_dim") or 0)
    if head_dim is None and isinstance(width, int) and isinstance(num_heads, int):
        head_dim = width // max(num_heads, 1)
    return {"num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def _rope(flat: Mapping[str, Any], get: Any) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return the kind of rope, its base, and the kind of layers with a window if it is another."""
    name = "rope_parameters" if flat.get("rope_parameters") else "rope_scaling"
    given = flat.get(name) or {}
    if not isinstance(given, Mapping):
        raise _wrong_type(name, given, "an object with a rope_type")
    rope, local = dict(given), {}
    # Gemma 3 in the new spelling has one entry for each kind of layer.
    if isinstance(rope.get("full_attention"), Mapping):
        local = dict(rope.get("sliding_attention") or {})
        rope = dict(rope["full_attention"])
    elif flat.get("rope_local_base_freq") is not None:
        local = {"rope_theta": flat["rope_local_base_freq"]}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if rope.get("rope_type") == "su":
        rope["rope_type"] = "longrope"  # its first name
    if rope.get("rope_type") in _STRETCHED:
        context = flat.get("original_max_position_embeddings") or get("max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", context)
    partial = flat.get("partial_rotary_factor")
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    theta = rope.pop("rope_theta", None) or flat.get("rope_theta")
    if rope.get("rope_type") == "default":
        del rope["rope_type"]
    return rope, theta, local


def _dtype(config: Mapping[str, Any], flat: Mapping[str, Any]) -> Any:
    new, old = flat.get("dtype"), flat.get("torch_dtype")
    if new is not None and old is not None and new != old:
        logger.warning(
            "config.json says dtype %r and torch_dtype %r; dtype, the newer key, counts", new, old
        )
    dtype = new if new is not None else old
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
    return None if dtype == "auto" else dtype


def _experts(flat: Mapping[str, Any], get: Any, num_layers: int) -> dict[str, Any]:
    num_experts = get("num_experts")
    if not isinstance(num_experts, int) or num_experts < 1:
        return {}
    width = flat.get("moe_intermediate_size") or get("intermediate_size")
    shared = flat.get("shared_expert_intermediate_size")
    if shared is None and isinstance(width, int):
        shared = width * (flat.get("n_shared_experts") or 0)
    dense = set(flat.get("mlp_only_layers") or ())
    first = flat.get("first_k_dense_replace") or 0
    step = flat.get("decoder_sparse_step") or flat.get("interleave_moe_layer_step") or 1
    every = flat.get("moe_layer_freq") if isinstance(flat.get("moe_layer_freq"), int) else 1
    layers = (
        index
        for index in range(num_layers)
        if index >= first
        and index not in dense
        and (index + 1) % step == 0
        and index % (every or 1) == 0
    )
    return {
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "moe_layers": tuple(layers),
    }


def _attention_layers(flat: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the window, and each layer's kind where they are not all alike."""
    window = flat.get("sliding_window")
    if flat.get("use_sliding_window") is False:
        window = None
    kinds = _layer_kinds(flat, num_layers, bool(window))
    if kinds is None:
        return {"sliding_window": window or None}
    if "chunked_attention" in (flat.get("layer_types") or ()):
        window = flat.get("attention_chunk_size") or window
    if not window:
        kinds = tuple("full" if kind == "sliding" else kind for kind in kinds)
    shared = flat.get("num_kv_shared_layers") or 0
    if shared:  # these read what an earlier layer has written
        first = num_layers - shared
        kinds = tuple(kind if index < first else "none" for index, kind in enumerate(kinds))
    return {
        "sliding_window": window if "sliding" in kinds else None,
        "layer_kinds": () if set(kinds) == {"full"} else kinds,
    }


def _layer_kinds(
    flat: Mapping[str, Any], num_layers: int, has_window: bool
) -> tuple[str, ...] | None:
    types = flat.get("layer_types") or flat.get("layers_block_type")
    if types:
        if not isinstance(types, list):
            raise _wrong_type("layer_types", types, "a list with the kind of each layer")
        if len(types) != num_layers:
            raise ModelError(
                f"config.json: layer_types names {len(types)} layers, but num_hidden_layers is "
                f"{num_layers}.",
                field="layer_types",
            )
        return tuple(_LAYER_KINDS.get(kind, "full") for kind in types)
    interval = flat.get("full_attention_interval")
    if interval is not None:  # the layers between have linear attention
        if not isinstance(interval, int) or interval < 1:
            raise _wrong_type("full_attention_interval", interval, "a positive whole number")
        return tuple("none" if (i + 1) % interval else "full" for i in range(num_layers))
    family = family_of(str(flat.get("model_type")))
    pattern = flat.get("sliding_window_pattern") or family.sliding_pattern
    if has_window and isinstance(pattern, int) and pattern > 0:
        return sliding_kinds(num_layers, pattern)
    first = flat.get("max_window_layers")
    if has_window and flat.get("use_sliding_window") and isinstance(first, int):
        return tuple("sliding" if index >= first else "full" for index in range(num_layers))
    return ("full",) * num_layers if flat.get("num_kv_shared_layers") else None


def _wrong_type(name: str, value: Any, wanted: str) -> ModelError:
    given = "missing" if value is None else msgspec.json.encode(value).decode()
    if len(given) > _MAX_SHOWN:
        given = given[:_MAX_SHOWN] + "…"
    return ModelError(f"config.json: {name} is {given}; it must be {wanted}.", field=name)


def _first(value: Any) -> Any:
    if isinstance(value, list):
        return value[0] if value else None
    return value
