"""All KV blocks of one engine: who holds them, which are free, which are known by key.

A block is in one of three states, and the counts add up to the pool at any time:

    used         ref count above 0
    cached-free  ref count 0, still known by its key: a hit takes it back
    free         ref count 0, nothing worth keeping

A key is the hash of a block's contents, and of its KV group if the model has several.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Ref-counted blocks with an O(1) free list in least-recently-used order.

    Args:
        num_blocks: Blocks in the pool; ids are 0 to ``num_blocks - 1``.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        # First out first. Blocks that nobody can hit go to the front, known ones to the back.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached-free ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that someone holds."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by key, held or not."""
        return len(self._by_key)

    @property
    def usage(self) -> float:
        """Share of the pool that is held, from 0 to 1."""
        return self.num_used / max(1, self.num_blocks)

    def ref_count(self, block_id: int) -> int:
        """Number of requests that hold a block."""
        return self._ref_counts[block_id]

    def key_of(self, block_id: int) -> bytes | None:
        """The key a block is known by, if any."""
        return self._keys[block_id]

    def allocate(self, count: int) -> tuple[list[int], list[tuple[int, bytes]]]:
        """Take `count` blocks, evicting the least recently used cached ones if it must be.

        The caller has checked `num_free`.

        Returns:
            The block ids, and for those that were evicted their ids and former keys.
        """
        assert count <= len(self._free), "allocate() without checking num_free"
        block_ids, evicted = [], []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            key = self._keys[block_id]
            if key is not None:
                self._drop_key(block_id)
                evicted.append((block_id, key))
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids, evicted

    def lookup(self, key: bytes) -> int | None:
        """Return the block that holds these contents, if there is one."""
        return self._by_key.get(key)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that a lookup found."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def register(self, block_id: int, key: bytes) -> bool:
        """Make a full block findable.

        Returns:
            False if another block has these contents already: the first one stays the
            one that is found, and this one is freed as if it had no key.
        """
        if key in self._by_key:
            return False
        self._by_key[key] = block_id
        self._keys[block_id] = key
        return True

    def free(self, block_ids: Iterable[int]) -> None:
        """Let go of blocks. Pass a request's blocks last to first, so that its tail is evicted
        before the prefix that others may share."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} freed twice"
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def forget(self, block_ids: Iterable[int]) -> list[bytes]:
        """Make blocks unfindable, because their contents turned out not to be there.

        Returns:
            The keys of those that could be found.
        """
        dropped = []
        for block_id in block_ids:
            key = self._keys[block_id]
            if key is not None:
                self._drop_key(block_id)
                dropped.append(key)
                if self._ref_counts[block_id] == 0:
                    self._free.move_to_end(block_id, last=False)
        return dropped

    def forget_all(self) -> None:
        """Make all blocks unfindable; those that are held stay held."""
        self._by_key.clear()
        self._keys = [None] * self.num_blocks

    def _drop_key(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        del self._by_key[key]
        self._keys[block_id] = None
