"""What happens to cached blocks, for routers that send requests where their prefix lies.

The shapes are those that vLLM publishes, so that a router made for it can read them:
a batch is the msgpack array ``[ts, events]``, an event an array that starts with its name.
"""

from __future__ import annotations

import msgspec

DEVICE, HOST = "gpu", "cpu"
"""Media of a block. A block on the engine's device is on "gpu", even where that is a CPU."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks can be found from now on.

    Attributes:
        block_hashes: One for each block, in order.
        parent_block_hash: Of the block before the first; None if that starts a prompt.
        token_ids: Of all the blocks. Neither is repeated when a block is copied to the
            host: they were told when it was stored on the device.
        block_size: Tokens in each.
        adapter: Adapter of the request that computed them.
        medium: Where they lie.
        group: Index of the KV group.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    adapter: str | None = None
    medium: str = DEVICE
    group: int = 0


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks can't be found any more in that medium."""

    block_hashes: list[bytes]
    medium: str = DEVICE
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events in the order in which they happened.

    Attributes:
        ts: Seconds since the epoch.
    """

    ts: float
    events: list[KVEvent]
