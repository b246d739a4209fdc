"""The paged cache of one layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KVCache(NamedTuple):
    """Keys and values of one layer; both ``[num_blocks, num_kv_heads, block_size, head_dim]``.

    With latent attention (MLA) all is in `key`, as one head, and `value` is its first part.
    """

    key: Tensor
    value: Tensor
