"""The base of policies that sort those who wait by a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Any

from octavo_core.policies.lazy_heap import LazyHeap
from octavo_core.request import Request, RequestStatus


class QueuePolicy(ABC):
    """One line, in the order of a key: the smallest goes first, the largest makes room.

    Among equal keys a preempted request comes before those that never ran, and an older
    one before a newer one. A policy of one's own needs a `sort_key` and no more.
    """

    def __init__(self) -> None:
        self._line: LazyHeap[Request] = LazyHeap()
        self._arrivals: dict[Request, int] = {}  # of all that live, in line or not
        self._next_arrival = count()

    @abstractmethod
    def sort_key(self, request: Request) -> Any:
        """Return what to sort a request by.

        It is asked for when the request gets in line and when a victim is needed; any type
        whose values can be compared will do.
        """

    def arrival(self, request: Request) -> int:
        """Return how many requests had come before this one. It keeps its number for life."""
        return self._arrivals[request]

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._line)

    def add(self, request: Request) -> None:
        """Put a new request in line."""
        self._arrivals[request] = next(self._next_arrival)
        self._enqueue(request, is_new=True)

    def requeue(self, request: Request) -> None:
        """Put a preempted request back, before those of its key that never ran."""
        self._enqueue(request, is_new=False)

    def peek(self) -> Request:
        """Return the head of the line."""
        return self._line.peek()

    def pop(self) -> Request:
        """Take the head of the line."""
        return self._line.pop()

    def remove(self, request: Request) -> None:
        """Take any waiting request out of line."""
        self._line.remove(request)
        if request.status is not RequestStatus.RUNNING:
            self.finish(request)

    def finish(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._arrivals.pop(request, None)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Choose the request with the largest key; of several, the newest."""
        return max(running, key=lambda request: (self.sort_key(request), self.arrival(request)))

    def _enqueue(self, request: Request, *, is_new: bool) -> None:
        self._line.push(request, (self.sort_key(request), is_new, self._arrivals[request]))
