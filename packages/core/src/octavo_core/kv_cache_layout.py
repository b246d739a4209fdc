"""How layers form groups, and what a block and a request take.

Layers with one window share a block table; with windows and full attention in one model there
are several groups over one pool, so each block must have the same bytes whoever gets it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.layer_spec import LayerSpec

# How unequal two kinds' layer counts may be to share the larger as their size.
_NEARLY_EQUAL = 1.5


class KVCacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, and the sizes that follow from them, on one device.

    Attributes:
        groups: Each layer that keeps K and V is in one of them.
        block_size: Tokens of a block.
        kv_bytes_per_token: K and V of one token over all layers.
        block_bytes: One block of any group.
    """

    groups: tuple[KVCacheGroup, ...]
    block_size: int
    kv_bytes_per_token: int
    block_bytes: int

    def blocks_per_request(self, num_tokens: int, num_in_flight: int = 1) -> int:
        """Count the blocks that one request holds at most.

        A layer with a window keeps what its next tokens can see; one block more, since a
        window seldom starts where a block does.

        Args:
            num_tokens: Of prompt and answer.
            num_in_flight: Most tokens of it in one step.
        """
        size = self.block_size
        whole = -(-num_tokens // size)
        count = 0
        for group in self.groups:
            if group.window is None:
                count += whole
            else:
                seen = min(group.window - 1 + num_in_flight, num_tokens)
                count += min(whole, -(-seen // size) + 1)
        return count

    def longest_request(self, num_blocks: int, limit: int, num_in_flight: int = 1) -> int:
        """Return the most tokens, up to `limit`, of a request that fits in `num_blocks`."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_per_request(middle, num_in_flight) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low


def group_layers(layers: Sequence[LayerSpec]) -> tuple[KVCacheGroup, ...]:
    """Deal the layers out to groups, one window to a group.

    Groups are of equal size, the smaller of the kinds' layer counts. If the larger is less
    than 1.5 times that, it is the size: one padded group costs less than two. The last
    groups of a kind may have a layer less; its place in their blocks stays empty.
    """
    kinds: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.kind != "none":
            kinds.setdefault(layer.window, []).append(index)
    if not kinds:
        return ()
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) < _NEARLY_EQUAL * min(counts) else min(counts)
    groups = []
    for window, members in kinds.items():
        num_groups = -(-len(members) // size)
        groups += [
            KVCacheGroup(tuple(members[first::num_groups]), window) for first in range(num_groups)
        ]
    return tuple(groups)


def lay_out_kv_cache(
    layers: Sequence[LayerSpec],
    *,
    block_size: int,
    dtype_bytes: int,
    tensor_parallel_size: int = 1,
    stage: range | None = None,
) -> KVCacheLayout:
    """Compute the layout of one device.

    Args:
        layers: All layers of the model.
        block_size: Tokens of a block.
        dtype_bytes: Of one number of K and V.
        tensor_parallel_size: Devices that share the heads.
        stage: The layers on this device; None means all.
    """
    present = stage if stage is not None else range(len(layers))
    page = [
        layers[index].kv_numbers_per_token(tensor_parallel_size) * dtype_bytes for index in present
    ]
    by_layer = dict(zip(present, page, strict=True))
    groups = group_layers(layers)
    # Block tables are the same on every stage, so groups are formed over the whole model.
    # Where shapes differ between groups, the largest is everyone's size.
    group_bytes = [sum(by_layer.get(index, 0) for index in group.layers) for group in groups]
    return KVCacheLayout(
        groups=groups,
        block_size=block_size,
        kv_bytes_per_token=sum(page),
        block_bytes=max(group_bytes, default=0) * block_size,
    )
