"""What the scheduler knows of one step."""

from __future__ import annotations

from octavo_core.block_manager import CachedPrefix, StepEffects
from octavo_core.request import Request


class Step:
    """A step in the making or in flight, and what is needed to complete or take it back.

    Attributes:
        budget: Tokens that may still be scheduled.
        now: When it is scheduled, in seconds since the epoch.
        requests, counts, starts: Who computes how many tokens from which position on.
        admitted: Those that enter a slot, with what the prefix cache had for them.
        added: Blocks for those that were in their slot before.
        constrained: Those whose next token is sampled under a grammar.
        has_grammars: Some request is under a grammar, whether its next token is sampled or not.
    """

    __slots__ = (
        "added",
        "admitted",
        "budget",
        "constrained",
        "counts",
        "effects",
        "freed_slots",
        "has_grammars",
        "has_preempted",
        "now",
        "requests",
        "starts",
        "step_id",
    )

    def __init__(self, budget: int, now: float) -> None:
        self.step_id = 0
        self.budget = budget
        self.now = now
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.starts: list[int] = []
        self.admitted: list[tuple[Request, CachedPrefix]] = []
        self.added: dict[Request, list[list[int]]] = {}
        self.constrained: list[Request] = []
        self.has_grammars = False
        self.has_preempted = False
        self.effects: StepEffects
        self.freed_slots: list[int]

    def add(self, request: Request, num_tokens: int, start: int) -> None:
        self.requests.append(request)
        self.counts.append(num_tokens)
        self.starts.append(start)
        self.budget -= num_tokens
        end = start + num_tokens
        request.num_computed_tokens = end
        if end >= len(request.token_ids):
            request.is_decoding = True
            if request.matcher is not None:
                self.constrained.append(request)
        self.has_grammars |= request.matcher is not None

    def take_back(self, request: Request) -> None:
        """Drop a request that became a victim, if it was scheduled already."""
        self.added.pop(request, None)
        if request not in self.requests:
            return
        index = self.requests.index(request)
        del self.requests[index]
        self.budget += self.counts.pop(index)
        request.num_computed_tokens = self.starts.pop(index)
        if request in self.constrained:
            self.constrained.remove(request)
