"""What one layer keeps in the KV cache."""

from __future__ import annotations

from typing import Literal

import msgspec

LayerKind = Literal["full", "sliding", "mla", "none"]


class LayerSpec(msgspec.Struct, frozen=True):
    """The KV cache of one layer.

    Attributes:
        kind: ``full`` attends to all tokens and ``sliding`` to the last `window`. ``mla``
            keeps one latent vector and one rotated key for all heads (DeepSeek-V2, Liu et
            al. 2024, arXiv 2405.04434). ``none`` keeps nothing that grows.
        num_kv_heads: Heads of K and V; 1 for ``mla``, 0 for ``none``.
        head_dim_k: Numbers of one head's K.
        head_dim_v: Numbers of one head's V; 0 for ``mla``, which has all in K.
        window: A token attends to this many tokens, itself included; None means all.
    """

    kind: LayerKind
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None

    def kv_numbers_per_token(self, tensor_parallel_size: int = 1) -> int:
        """Count the numbers of K and V that one token takes on one of the devices.

        Heads are split over the devices, and each has at least one. A latent vector is on all.
        """
        if self.kind == "none":
            return 0
        heads = self.num_kv_heads
        if self.kind != "mla":
            heads = -(-heads // tensor_parallel_size)
        return heads * (self.head_dim_k + self.head_dim_v)
