"""Writes the tiny models of `tiny_families` as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NAMES = {
    "deepseek2": {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    },
    "gemma2": GEMMA_NAMES,
    "gemma3": GEMMA_NAMES,
    "gpt2": {
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
COMMON_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
PROJECTIONS = {"w1": "gate", "w3": "up", "w2": "down"} | {
    f"{name}_proj": name for name in ("gate", "up", "down")
}
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")

Quantize = Callable[[str, np.ndarray], gguf.GGMLQuantizationType | None]
"""From a tensor's name in the file and its numbers to the type it is to have; None for float32."""


def write_gguf_family(
    path: Path,
    folder: Path,
    architecture: str,
    *,
    quantize: Quantize = lambda name, weights: None,
    splits_latents: bool = False,
) -> None:
    """Write a file of the model in a folder.

    Args:
        path: Of the new file.
        folder: Where transformers saved the model.
        architecture: GGUF's name of it.
        quantize: Chooses types.
        splits_latents: Whether the projection of DeepSeek's latents is written as two.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config, architecture)
    if hasattr(config, "rope_parameters"):
        _write_rope(writer, config, architecture)
    tensors = dict(_tensors(folder, config, architecture))
    if splits_latents:
        tensors = _split_latents(tensors, config)
    for name, weights in tensors.items():
        kind = quantize(name, weights)
        if kind is None:
            writer.add_tensor(name, weights)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    is_latent = architecture == "deepseek2"
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(
        getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    )
    writer.add_head_count(heads)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count_kv(1 if is_latent else config.num_key_value_heads)
    if is_latent:
        rank, rotary = config.kv_lora_rank, config.qk_rope_head_dim
        writer.add_kv_lora_rank(rank)
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length(rank + rotary)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + rotary)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(rotary)
    else:
        head_dim = getattr(config, "head_dim", config.hidden_size // heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts or is_latent:
        writer.add_expert_count(experts or config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(width)
    if is_latent:
        is_v3 = config.model_type == "deepseek_v3"
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        gating = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(gating.SIGMOID if is_v3 else gating.SOFTMAX)
        if is_v3:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)


def _write_rope(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if rope["rope_type"] == "longrope":
        context = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / context
        writer.add_rope_scaling_orig_ctx_len(context)
        writer.add_rope_scaling_attn_factors((1 + np.log(stretch) / np.log(context)) ** 0.5)
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _tensors(folder: Path, config: Any, architecture: str) -> list[tuple[str, np.ndarray]]:
    names = {**COMMON_NAMES, **NAMES.get(architecture, {})}
    found: list[tuple[str, torch.Tensor]] = []
    experts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in load_file(folder / "model.safetensors").items():
        expert = EXPERT.fullmatch(name)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if expert is not None:
            layer, index, projection = expert.groups()
            stack = f"blk.{layer}.ffn_{PROJECTIONS[projection]}_exps.weight"
            experts[stack][int(index)] = tensor
        elif ".mlp.experts." in name:
            found += _gpt_oss_experts(name, tensor)
        elif name.endswith("sinks"):
            found.append((f"blk.{name.split('.')[2]}.attn_sinks.weight", tensor))
        elif name.endswith("e_score_correction_bias"):
            found.append((f"blk.{name.split('.')[2]}.exp_probs_b.bias", tensor))
        else:
            found.append((_stored_name(name, names), _stored(name, tensor, config, architecture)))
    for stack, tensors in experts.items():
        found.append((stack, torch.stack([tensors[index] for index in range(len(tensors))])))
    return [(name, np.ascontiguousarray(tensor.float().numpy())) for name, tensor in found]


def _gpt_oss_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    prefix, kind = f"blk.{name.split('.')[2]}.ffn", "bias" if name.endswith("bias") else "weight"
    if kind == "weight":
        tensor = tensor.transpose(1, 2)
    if "down_proj" in name:
        return [(f"{prefix}_down_exps.{kind}", tensor)]
    return [
        (f"{prefix}_gate_exps.{kind}", tensor[:, ::2]),
        (f"{prefix}_up_exps.{kind}", tensor[:, 1::2]),
    ]


def _stored_name(name: str, names: dict[str, str]) -> str:
    module, kind = name.rsplit(".", 1)
    if module in names:
        return f"{names[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{kind}"


def _stored(name: str, tensor: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    if architecture.startswith("gemma") and "norm" in name:
        return tensor + 1
    if architecture == "gpt2" and ".h." in name and tensor.ndim == 2:
        return tensor.t()
    if architecture == "llama" and re.search(r"self_attn\.[qk]_proj", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)  # pairs side by side
    return tensor


def _split_latents(tensors: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """Write keys' and values' projections apart, the keys' turned around."""
    split: dict[str, np.ndarray] = {}
    for name, weights in tensors.items():
        if ".attn_kv_b." not in name:
            split[name] = weights
            continue
        heads = weights.reshape(config.num_attention_heads, -1, weights.shape[1])
        key, value = np.split(heads, [config.qk_nope_head_dim], axis=1)
        split[name.replace("kv_b", "k_b")] = np.ascontiguousarray(key.transpose(0, 2, 1))
        split[name.replace("kv_b", "v_b")] = np.ascontiguousarray(value)
    return split
