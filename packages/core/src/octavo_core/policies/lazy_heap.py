"""A heap from which any item can be taken."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Items by key, the smallest first; of equal keys the one pushed first.

    Taking an item out of the middle leaves its entry in the heap; entries that nobody
    owns any more are dropped when they reach the top, or all at once when they are the
    majority. So every operation costs O(log n), spread over the operations before it,
    and the memory stays proportional to the items.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._entries: dict[T, tuple[Any, int, T]] = {}
        self._count = count()  # makes entries comparable, whatever the items are

    def __len__(self) -> int:
        """Number of items."""
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        """True if `item` is here."""
        return item in self._entries

    def push(self, item: T, key: Any) -> None:
        """Add an item, or give it another key."""
        entry = (key, next(self._count), item)
        self._entries[item] = entry
        heappush(self._heap, entry)
        self._drop_majority()

    def peek(self) -> T:
        """Return the item with the smallest key. There is one."""
        heap, entries = self._heap, self._entries
        while entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0][2]

    def pop(self) -> T:
        """Take the item with the smallest key."""
        item = self.peek()
        heappop(self._heap)
        del self._entries[item]
        return item

    def remove(self, item: T) -> None:
        """Take any item."""
        del self._entries[item]
        self._drop_majority()

    def key_of(self, item: T) -> Any:
        """Return the key an item was pushed with."""
        return self._entries[item][0]

    def _drop_majority(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapify(self._heap)
