"""Embedding of tokens from a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads
from octavo_kernels.dispatch import use_cpu
from octavo_kernels.packed_weight import WEIGHT_KINDS, PackedWeight
from octavo_kernels.unpack_weight import unpack_weight

EMBED = {kind: Kernel(f"embedding.{kind}", "qqqqqqq") for kind in WEIGHT_KINDS if kind != "e4m3"}
_ALONE = 1 << 14


def embed_tokens(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    """Look rows of a packed weight up.

    Args:
        token_ids: ``[num_tokens]`` integers below ``vocab_size``.
        weight: ``[vocab_size, hidden_size]``.

    Returns:
        ``[num_tokens, hidden_size]`` float32, bit for bit those rows of `unpack_weight`.
    """
    if (
        weight.kind not in EMBED
        or weight.input_order is not None
        or not use_cpu(token_ids, weight.data)
    ):
        return embed_tokens_reference(token_ids, weight)
    ids = token_ids.to(torch.int32).contiguous()
    num_tokens, hidden_size = ids.shape[0], weight.shape[1]
    out = torch.empty(num_tokens, hidden_size)
    scratch = torch.empty(64 * get_num_threads(), dtype=torch.uint8)
    kernel = EMBED[weight.kind]
    run = kernel.alone if out.numel() <= _ALONE else kernel
    run(
        ids.data_ptr(),
        num_tokens,
        hidden_size,
        weight.data.data_ptr(),
        0 if weight.scales is None else weight.scales.data_ptr(),
        scratch.data_ptr(),
        out.data_ptr(),
    )
    return out


def embed_tokens_reference(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    """The torch twin of `embed_tokens`."""
    return unpack_weight(weight).index_select(0, token_ids.long())
