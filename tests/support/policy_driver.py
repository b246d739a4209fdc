"""Drives a scheduling policy as a scheduler would, without a KV cache."""

from __future__ import annotations

from typing import Any

from octavo_core.policies import QueuePolicy, SchedulingPolicy
from octavo_core.request import Request, RequestStatus
from support.engine_fakes import make_request


def make_waiting(
    request_id: str,
    prompt: int = 4,
    *,
    priority: int = 0,
    tenant: str | None = None,
    max_tokens: int = 1000,
    **fields: Any,
) -> Request:
    """A request as the scheduler makes it."""
    wire = make_request(request_id, prompt, max_tokens, priority=priority, tenant=tenant, **fields)
    return Request(wire, max_model_len=1_000_000)


class ShortestPromptFirst(QueuePolicy):
    """A policy of somebody else's."""

    def sort_key(self, request: Request) -> int:
        return request.num_prompt_tokens


class PolicyDriver:
    """Requests in line and running, and the events that can happen to them.

    Attributes:
        waiting: In order of arrival.
        running: In order of admission.
        admitted: Every admission so far.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.admitted: list[Request] = []
        self.arrivals: dict[Request, int] = {}

    def arrive(self, request: Request) -> Request:
        self.arrivals[request] = len(self.arrivals)
        self.waiting.append(request)
        self.policy.add(request)
        self.check()
        return request

    def admit(self) -> Request:
        head = self.policy.peek()
        assert self.policy.peek() is head
        assert self.policy.pop() is head
        self.waiting.remove(head)
        head.status = RequestStatus.RUNNING
        self.running.append(head)
        self.admitted.append(head)
        self.check()
        return head

    def admit_out_of_turn(self, request: Request) -> None:
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self.policy.remove(request)
        self.running.append(request)
        self.check()

    def preempt(self) -> Request:
        victim = self.policy.choose_victim(self.running)
        self.running.remove(victim)
        victim.num_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        self.waiting = sorted([*self.waiting, victim], key=self.arrivals.__getitem__)
        self.policy.requeue(victim)
        self.check()
        return victim

    def step(self) -> None:
        """Each running request gets a token; those that are complete end."""
        for request in tuple(self.running):
            request.token_ids.append(0)
            if request.ends_with(0):
                self.running.remove(request)
                self.policy.finish(request)
        self.check()

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        request.status = RequestStatus.FINISHED_STOPPED
        self.policy.finish(request)
        self.check()

    def abort(self, request: Request) -> None:
        """End a request in whichever state."""
        if request in self.running:
            return self.finish(request)
        self.waiting.remove(request)
        request.status = RequestStatus.FINISHED_ABORTED
        self.policy.remove(request)
        return self.check()

    def check(self) -> None:
        assert len(self.policy) == len(self.waiting)
        if self.waiting:
            assert self.policy.peek() in self.waiting
