"""Copies of evicted KV blocks in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostTier:
    """Host blocks by the key of what they hold, in least-recently-used order.

    It holds names only; the copies are the worker's. A step copies out first and in after,
    so a block may be stored and found in one step. But what a step copies in must not be
    overwritten by what the same step copies out: `pin` holds it until the step is made.

    Args:
        num_blocks: Host blocks; ids are 0 to ``num_blocks - 1``. 0 stores nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._by_key: OrderedDict[bytes, int] = OrderedDict()  # the oldest is first
        self._free = list(range(num_blocks - 1, -1, -1))
        self._pinned: set[bytes] = set()

    @property
    def num_used(self) -> int:
        """Blocks that hold a copy."""
        return len(self._by_key)

    def lookup(self, key: bytes) -> int | None:
        """Return the host block that holds these contents, if there is one."""
        return self._by_key.get(key)

    def store(self, key: bytes) -> tuple[int | None, bytes | None]:
        """Find a place for contents that leave the device.

        Returns:
            The host block to copy to, None if there is a copy already or no place; and
            the key that had to go.
        """
        if key in self._by_key:
            self._by_key.move_to_end(key)
            return None, None
        if self._free:
            self._by_key[key] = self._free.pop()
            return self._by_key[key], None
        victim = next((old for old in self._by_key if old not in self._pinned), None)
        if victim is None:
            return None, None
        self._by_key[key] = self._by_key.pop(victim)
        return self._by_key[key], victim

    def pin(self, keys: Iterable[bytes]) -> None:
        """Hold contents that the step in the making copies in."""
        for key in keys:
            self._pinned.add(key)
            self._by_key.move_to_end(key)

    def unpin_all(self) -> None:
        """Let go of what was held: the step is made."""
        self._pinned.clear()

    def forget(self, keys: Iterable[bytes]) -> list[bytes]:
        """Drop contents whose copies were never made; return those that were there."""
        dropped = []
        for key in keys:
            block_id = self._by_key.pop(key, None)
            if block_id is not None:
                self._free.append(block_id)
                dropped.append(key)
        return dropped

    def clear(self) -> None:
        """Drop everything."""
        self._by_key.clear()
        self._pinned.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
