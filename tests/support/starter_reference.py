"""The starter model in transformers, its weights unpacked by code that is not ours."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def starter_reference(path: Path) -> LlamaForCausalLM:
    """Load the starter model's GGUF file in float32."""
    # SmolLM2-135M-Instruct's config.json.
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    reference = LlamaForCausalLM(config)
    # from_pretrained(gguf_file=...) does this too, but wants accelerate.
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)
    missing, unexpected = reference.load_state_dict(loaded["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()
    return reference.eval()
