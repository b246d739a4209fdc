"""The starter model in transformers, its weights unpacked by code that is not ours."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from support.gguf_reader import QuickReader

NUM_LAYERS = 30


@cache
def starter_reference(path: Path) -> LlamaForCausalLM:
    """Load the starter model's GGUF file in float32; once, for it takes seconds."""
    # SmolLM2-135M-Instruct's config.json.
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with no_init_weights():
        reference = LlamaForCausalLM(config)
    # from_pretrained(gguf_file=...) does this too, but wants accelerate, and looks through all
    # names of tensors for each module: 20 s of a core's time, not 5.
    missing, unexpected = reference.load_state_dict(read_weights(path, reference), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()
    return reference.eval()


def read_weights(path: Path, reference: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Unpack the tensors of a GGUF file, under their names in transformers."""
    tensors = {tensor.name: tensor for tensor in QuickReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    processor = LlamaTensorProcessor(reference.config.to_dict())
    weights = {}
    for name in reference.state_dict():
        found = tensors.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight", None)
        if found is not None:  # lm_head has the embedding's
            unpacked = gguf.dequantize(found.data, found.tensor_type)
            unpacked = processor.process(unpacked, found.name).weights
            weights[name] = torch.from_numpy(np.ascontiguousarray(unpacked))
    assert not tensors, f"{list(tensors)} were not used"
    return weights
