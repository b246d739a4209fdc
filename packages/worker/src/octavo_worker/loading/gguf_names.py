"""From GGUF's names of tensors to those of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

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
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CHANGES: dict[str, Mapping[str, str]] = {
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
# Which are no module's weight or bias in transformers.
_WHOLE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
# What a mixture calls an expert's gate, up and down.
_EXPERTS = ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
_MIXTRAL_EXPERTS = ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})
# Frequencies of rope are hyper-parameters, which `octavo_core.gguf_config` has read.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)")


class ExpertStack(NamedTuple):
    """A tensor that holds one projection of all experts of a layer.

    Attributes:
        layer: Index of the layer.
        projection: ``gate``, ``up`` or ``down``.
        kind: ``weight`` or ``bias``.
    """

    layer: int
    projection: str
    kind: str

    def name_of(self, expert: int, architecture: str) -> str:
        """Return the name of one expert's part."""
        module, names = _MIXTRAL_EXPERTS if architecture == "llama" else _EXPERTS
        layer = f"model.layers.{self.layer}.{module}"
        return f"{layer}.experts.{expert}.{names[self.projection]}.{self.kind}"


def expert_stack(name: str) -> ExpertStack | None:
    """Recognise a tensor that holds all experts."""
    found = _STACK.fullmatch(name)
    return None if found is None else ExpertStack(int(found[1]), found[2], found[3])


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
    expert = _EXPERT.fullmatch(name)
    if expert is not None:  # as the first mixtures were written
        stack = ExpertStack(int(expert[1]), expert[2], "weight")
        return stack.name_of(int(expert[3]), architecture)
    names = _GPT2_NAMES if architecture == "gpt2" else _names(architecture)
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        index, module, kind = layer.groups()
        prefix = f"transformer.h.{index}" if architecture == "gpt2" else f"model.layers.{index}"
        whole = _WHOLE_NAMES.get(f"{module}.{kind}")
        return f"{prefix}.{whole or f'{names.get(module, module)}.{kind}'}"
    module, _, kind = name.rpartition(".")
    return f"{names[module]}.{kind}" if module in names else name


def _names(architecture: str) -> Mapping[str, str]:
    return {**_OUTER_NAMES, **_LAYER_NAMES, **_CHANGES.get(architecture, {})}
