"""From GGUF's names of tensors to those of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CHANGES: dict[str, Mapping[str, str]] = {
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
# Frequencies of rope are hyper-parameters, which `octavo_core.gguf_config` has read.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def checkpoint_name(name: str, architecture: str) -> str | None:
    """Translate a tensor's name; an unknown one keeps its own within its layer.

    Args:
        name: In the file.
        architecture: GGUF's name of it.

    Returns:
        None for what is no weight.
    """
    if name in _ROPE_TENSORS:
        return None
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name)
    if layer is not None:
        index, module, kind = layer.groups()
        names = {**_LAYER_NAMES, **_CHANGES.get(architecture, {})}
        return f"model.layers.{index}.{names.get(module, module)}.{kind}"
    module, _, kind = name.rpartition(".")
    return f"{_OUTER_NAMES[module]}.{kind}" if module in _OUTER_NAMES else name
