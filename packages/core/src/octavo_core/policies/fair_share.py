"""Every tenant gets the same service, however much it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from octavo_core.errors import ConfigError
from octavo_core.policies.lazy_heap import LazyHeap
from octavo_core.request import Request, RequestStatus


class _Tenant:
    """One tenant's line and what it was given so far."""

    __slots__ = ("line", "name", "num_counted_tokens", "running", "service")

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.service = 0.0
        self.line: LazyHeap[Request] = LazyHeap()
        # With their tokens, so that counting them takes 20 ns each and not 100: it is done at
        # every step while the head of the line waits for blocks.
        self.running: dict[Request, list[int]] = {}
        self.num_counted_tokens = 0  # of `running`, as of the last time


class FairSharePolicy:
    """The oldest request of the tenant that was given least; the most served makes room.

    The method is the virtual token counter of Sheng et al., "Fairness in Serving Large
    Language Models" (arXiv 2401.00588). A tenant's *service* is its prompt tokens, counted
    when a request is first admitted, and its output tokens as they come, each with a
    weight. Tokens from the prefix cache count like others, and tokens that are computed
    again after a preemption count once: service is what a tenant gets, not what it costs.
    A tenant that has nothing in line saves nothing up. When it comes back, its counter is
    lifted to the *floor*, the smallest counter of those that wait (or, if nobody does, the
    one that the last admission saw).

    The bound: of two tenants that both have requests in line all the time, neither is
    given more than 2 U more than the other over any time, where

        U = input_weight × L + output_weight × S × N

    with L the longest prompt, S the most requests that run at once (``max_num_seqs``) and
    N the most output tokens of a request. Proof: the floor never falls, for an admission
    takes the smallest counter in line, newcomers are lifted to the floor and counters only
    grow; and no counter in line is below it. Nor is any counter above floor + U: when a
    tenant was last admitted or lifted, its counter was the floor of that moment (or it was
    not lifted because it was above, and the moment before that counts). Since then it was
    given at most the prompt of that admission, and the outputs of requests that ran then,
    which are S at most. (Requests that are admitted out of turn, after a step has failed,
    are not in this count.) So counters in line are within U of each other at both ends of any
    time, and a counter that is never lifted grows by exactly what its tenant is given.

    A tenant that comes back, and is not ahead of the floor, is therefore served after at
    most one new request of each other tenant in line: a flood of one tenant delays nobody
    else. Requests without a tenant share one. Who can invent tenants can invent shares.

    What running requests were given is counted when it matters, for the tenants at the
    head of the line: O(running) a call at worst, however many wait.

    Args:
        input_weight: Service of a prompt token.
        output_weight: Service of an output token; more than a prompt token's, because
            prompts are computed many tokens at a time.
        max_idle_tenants: Tenants with nothing in line and nothing running whose counters
            are remembered. Beyond that, those nearest to the floor are forgotten.
    """

    def __init__(
        self,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        max_idle_tenants: int = 4096,
    ) -> None:
        for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
            if not 0 < weight < float("inf"):
                raise ConfigError(f"{name} is {weight}; it must be above 0.", field=name)
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._max_idle_tenants = max_idle_tenants
        self._tenants: dict[str | None, _Tenant] = {}
        self._waiting: LazyHeap[_Tenant] = LazyHeap()  # by service as it was last counted
        self._idle: LazyHeap[_Tenant] = LazyHeap()  # by service
        self._floor = 0.0
        self._num_waiting = 0
        self._arrivals: dict[Request, int] = {}
        self._next_arrival = count()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return self._num_waiting

    def service_of(self, tenant: str | None) -> float:
        """Return a tenant's counter as of now; the floor, if it is not remembered."""
        known = self._tenants.get(tenant)
        if known is None:
            return self._floor
        self._count(known)
        return known.service

    def add(self, request: Request) -> None:
        """Put a new request at the end of its tenant's line."""
        self._arrivals[request] = next(self._next_arrival)
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Tenant(request.tenant)
        elif tenant in self._idle:
            self._idle.remove(tenant)
        self._enqueue(tenant, request, is_new=True)

    def requeue(self, request: Request) -> None:
        """Put a preempted request at the head of its tenant's line."""
        tenant = self._tenants[request.tenant]
        self._stop(tenant, request)
        self._enqueue(tenant, request, is_new=False)

    def peek(self) -> Request:
        """Return the oldest request of the least served tenant in line."""
        return self._least_served().line.peek()

    def pop(self) -> Request:
        """Take that request, and count its prompt."""
        tenant = self._least_served()
        request = tenant.line.peek()
        self._floor = max(self._floor, tenant.service)
        self._start(tenant, request)
        return request

    def remove(self, request: Request) -> None:
        """Take any waiting request out of line."""
        tenant = self._tenants[request.tenant]
        if request.status is RequestStatus.RUNNING:
            self._start(tenant, request)
        else:
            self._dequeue(tenant, request)
            self._forget(tenant, request)

    def finish(self, request: Request) -> None:
        """Count what a request was given in the end, and forget it."""
        tenant = self._tenants.get(request.tenant)
        if tenant is not None and request in tenant.running:
            self._stop(tenant, request)
            self._forget(tenant, request)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Choose the newest request of the most served tenant."""
        tenants = self._tenants
        for name in {request.tenant for request in running}:
            self._count(tenants[name])
        return max(
            running,
            key=lambda request: (tenants[request.tenant].service, self._arrivals[request]),
        )

    def _enqueue(self, tenant: _Tenant, request: Request, *, is_new: bool) -> None:
        if not len(tenant.line):
            if len(self._waiting):
                # Maybe not counted up to now, and then too low, which is as good a floor.
                smallest = self._waiting.key_of(self._waiting.peek())
                self._floor = max(self._floor, smallest)
            self._count(tenant)
            tenant.service = max(tenant.service, self._floor)
            self._waiting.push(tenant, tenant.service)
        tenant.line.push(request, (is_new, self._arrivals[request]))
        self._num_waiting += 1

    def _start(self, tenant: _Tenant, request: Request) -> None:
        is_new, _ = tenant.line.key_of(request)
        self._dequeue(tenant, request)
        if is_new:
            tenant.service += self._input_weight * request.num_prompt_tokens
        tenant.running[request] = request.token_ids
        tenant.num_counted_tokens += len(request.token_ids)

    def _dequeue(self, tenant: _Tenant, request: Request) -> None:
        tenant.line.remove(request)
        self._num_waiting -= 1
        if not len(tenant.line):
            self._waiting.remove(tenant)

    def _least_served(self) -> _Tenant:
        """Return the tenant in line with the smallest counter, as of now.

        Counters only grow: one that is the smallest after it was counted anew is smaller
        than the others would be, too. Tenants without running requests need no counting, so
        the loop ends after as many tenants as have some.
        """
        waiting = self._waiting
        while True:
            tenant = waiting.peek()
            self._count(tenant)
            if tenant.service == waiting.key_of(tenant):
                return tenant
            waiting.push(tenant, tenant.service)

    def _count(self, tenant: _Tenant) -> None:
        """Add the output tokens that have come since the last time."""
        num_tokens = sum(map(len, tenant.running.values()))
        tenant.service += self._output_weight * (num_tokens - tenant.num_counted_tokens)
        tenant.num_counted_tokens = num_tokens

    def _stop(self, tenant: _Tenant, request: Request) -> None:
        self._count(tenant)
        del tenant.running[request]
        tenant.num_counted_tokens -= len(request.token_ids)

    def _forget(self, tenant: _Tenant, request: Request) -> None:
        """Forget an ended request, and tenants that need not be remembered."""
        del self._arrivals[request]
        if not len(tenant.line) and not tenant.running:
            self._idle.push(tenant, tenant.service)
        idle = self._idle
        while len(idle) and (
            # It would be lifted to the floor anyway.
            idle.key_of(idle.peek()) <= self._floor or len(idle) > self._max_idle_tenants
        ):
            del self._tenants[idle.pop().name]
