"""The logits of one prompt, without an engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_worker.kv_caches import allocate_kv_caches
from octavo_worker.model_runner import ModelRunner
from octavo_worker.models import Model

BLOCK_SIZE = 8
CPU = torch.device("cpu")


@torch.inference_mode()
def prompt_logits(model: Model, spec: ModelSpec, token_ids: list[int]) -> Tensor:
    """Compute ``[num_tokens, vocab_size]`` of one prompt, over a cache of its own."""
    groups = spec.kv_cache_groups()
    runner = ModelRunner(model, max_num_seqs=1, block_size=BLOCK_SIZE, device=CPU, groups=groups)
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    caches = allocate_kv_caches(spec, num_blocks * len(groups), BLOCK_SIZE, torch.float32, CPU)
    first_blocks = [group * num_blocks for group in range(len(groups))]
    model_input = runner.to_device(
        input_ids=np.array(token_ids, np.int32),
        positions=np.arange(num_tokens),
        query_start_loc=np.array([0, num_tokens]),
        seq_lens=np.array([num_tokens]),
        slot_mappings=[BLOCK_SIZE * first + np.arange(num_tokens) for first in first_blocks],
        block_tables=[
            np.arange(first, first + num_blocks, dtype=np.int32)[None] for first in first_blocks
        ],
    )
    return model.compute_logits(runner.forward(model_input, caches))
