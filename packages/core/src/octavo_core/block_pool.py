"""All KV blocks of one engine: who holds them, which are free, which are known by hash.

A block is in one of three states, and the counts add up to the pool at any time:

    used         ref count above 0
    cached-free  ref count 0, still known by its hash: a hit takes it back
    free         ref count 0, nothing worth keeping
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
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # First out first. Blocks that nobody can hit go to the front, hashed ones to the back.
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
    def usage(self) -> float:
        """Share of the pool that is held, from 0 to 1."""
        return self.num_used / self.num_blocks

    def ref_count(self, block_id: int) -> int:
        """Number of requests that hold a block."""
        return self._ref_counts[block_id]

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash a block is known by, if any."""
        return self._hashes[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting the least recently used cached ones if it must be.

        The caller has checked `num_free`.
        """
        assert count <= len(self._free), "allocate() without checking num_free"
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._drop_hash(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block that holds these contents, if there is one."""
        return self._by_hash.get(block_hash)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that a lookup found."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Make a full block findable.

        Returns:
            False if other blocks have these contents already: the first one stays the
            one that is found, and this one is freed as if it had no hash.
        """
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def free(self, block_ids: Iterable[int]) -> None:
        """Let go of blocks. Pass a request's blocks last to first, so that its tail is evicted
        before the prefix that others may share."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} freed twice"
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, because their contents turned out not to be there."""
        for block_id in block_ids:
            self._drop_hash(block_id)

    def reset_cache(self) -> bool:
        """Forget every hash. Returns False, and does nothing, while blocks are held."""
        if self.num_used:
            return False
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks
        return True

    def _drop_hash(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None
