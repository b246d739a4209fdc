"""What the scheduler asks of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo_core.request import Request


class SchedulingPolicy(Protocol):
    """The order of waiting requests, and the choice of a victim.

    A request's life, as a policy sees it:

        add ─▶ (in line) ─ pop ─▶ (runs) ─ finish ─▶
                  │  ▲               │
             remove  └── requeue ────┘
                  ▼

    So the end of each request is told once, by `remove` while it is in line and by `finish`
    when it is not. The scheduler asks for the head of the line only, several times a step,
    so none of these may cost time in the number of those who wait (O(log n) is fine).
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
        """Return the request whose turn it is. There is one.

        It keeps its turn until it is popped or removed, another comes, or a step has run.
        """
        ...

    def pop(self) -> Request:
        """Take that request out of line: it runs from now on."""
        ...

    def remove(self, request: Request) -> None:
        """Take any waiting request out of line: it has ended.

        One whose status is ``RUNNING`` has not: it was admitted out of turn, to find out
        which request makes steps fail, and goes on as if it had been popped.
        """
        ...

    def finish(self, request: Request) -> None:
        """Forget a request that was popped and has ended, in whichever way."""
        ...

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Choose whom to preempt.

        Args:
            running: All that were popped and have not ended, in order of admission; at
                least one.
        """
        ...
