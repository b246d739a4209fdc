"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from octavo_core.policies.queue_policy import QueuePolicy
from octavo_core.request import Request


class FCFSPolicy(QueuePolicy):
    """First come, first served; the newest makes room."""

    def sort_key(self, request: Request) -> int:
        """Return the same for all: the order of arrival decides."""
        return 0

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Choose the request that was admitted last."""
        return running[-1]
