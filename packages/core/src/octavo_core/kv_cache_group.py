"""Layers whose KV blocks are handed out together."""

from __future__ import annotations

import msgspec


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers with equal KV shapes and one window, under one block table.

    All groups of a model have the same number of layers (the last of a kind may be padded),
    so a block of any group has the same bytes, and all share one pool.

    Attributes:
        layers: Indices of the model's layers.
        window: A token attends to this many tokens, itself included; None means all.
    """

    layers: tuple[int, ...]
    window: int | None = None
