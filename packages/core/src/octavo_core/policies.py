"""Who goes first, and who has to make room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from octavo_core.request import Request


class SchedulingPolicy(Protocol):
    """The order of waiting requests, and the choice of a victim.

    The scheduler asks for the head of the line only, so a policy's cost must not grow
    with the number of those who wait.
    """

    def __len__(self) -> int:
        """Number of waiting requests."""
        ...

    def add(self, request: Request) -> None:
        """Put a new request in line."""
        ...

    def requeue(self, request: Request) -> None:
        """Put a preempted request back in line, where it gets its turn again soon."""
        ...

    def peek(self) -> Request:
        """Return the request whose turn it is. There is one."""
        ...

    def pop(self) -> Request:
        """Take that request out of line."""
        ...

    def remove(self, request: Request) -> None:
        """Take any waiting request out of line."""
        ...

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Choose whom to preempt; `running` is in order of admission and not empty."""
        ...

    def finish(self, request: Request) -> None:
        """Take note that a request that was admitted has ended."""
        ...


class FCFSPolicy:
    """First come, first served; the newest makes room."""

    def __init__(self) -> None:
        self._line: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._line)

    def add(self, request: Request) -> None:
        """Put a request at the end of the line."""
        self._line[request.request_id] = request

    def requeue(self, request: Request) -> None:
        """Put a request at the head of the line: it came before all who wait."""
        self._line[request.request_id] = request
        self._line.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Return the head of the line."""
        return next(iter(self._line.values()))

    def pop(self) -> Request:
        """Take the head of the line."""
        return self._line.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take one request out of line."""
        del self._line[request.request_id]

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Choose the request that was admitted last."""
        return running[-1]

    def finish(self, request: Request) -> None:
        """Nothing is kept of a request that has ended."""
