"""Families from GGUF files against transformers' model of the same weights."""

import gguf
import numpy as np
import pytest
import torch

from octavo_core.model_spec import read_model_spec
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from support.one_prompt import prompt_logits
from support.tiny_families import VOCAB_SIZE, save_family

CPU = torch.device("cpu")
TOLERANCE = 1e-4
WHOLE_BLOCKS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
NAMES = {
    "gemma2": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
NAMES["gemma3"] = NAMES["gemma2"]
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
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _write_gguf(path, model, architecture):
    """Write a file as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        context = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / context
        writer.add_rope_scaling_orig_ctx_len(context)
        writer.add_rope_scaling_attn_factors((1 + np.log(stretch) / np.log(context)) ** 0.5)
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    names = {**COMMON_NAMES, **NAMES.get(architecture, {})}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = np.ascontiguousarray(tensor.numpy())
        if architecture.startswith("gemma") and "norm" in name:
            weights = weights + 1
        writer.add_tensor(_stored_name(name, names), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored_name(name, names):
    module, kind = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{names[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{kind}"


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        ("gemma2", "gemma2", GEMMA),
        ("gemma3", "gemma3", {**GEMMA, "num_hidden_layers": 6, "layer_types": None}),
        ("phi3", "phi3", {"num_attention_heads": 4, "hidden_size": 64}),
    ],
)
def test_gguf_family_matches_transformers(family, architecture, changes, quantization, tmp_path):
    reference = save_family(family, tmp_path / "folder", **{**WHOLE_BLOCKS, **changes})
    path = tmp_path / "model.gguf"
    _write_gguf(path, reference, architecture)
    spec = read_model_spec(path)
    form = WeightForm(torch.float32, quantization)
    weights = load_weights(spec, path, form, CPU, lambda *_: None)
    model = resolve_model_class(spec)(spec, weights, 64, CPU)
    token_ids = torch.randint(0, VOCAB_SIZE, (40,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    found = prompt_logits(model, spec, token_ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
