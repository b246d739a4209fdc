"""The more important first, without letting anybody starve."""

from __future__ import annotations

from octavo_core.errors import ConfigError
from octavo_core.policies.lazy_heap import LazyHeap
from octavo_core.policies.queue_policy import QueuePolicy
from octavo_core.request import Request


class PriorityPolicy(QueuePolicy):
    """The lowest ``priority`` value first, then the oldest; every k-th turn the oldest of all.

    A waiting request never drives out a running one, however important it is: only a lack
    of KV blocks does, and then the victim is the running request with the largest value,
    the newest of several.

    No request waits for ever. Every k-th admission takes the oldest request in line
    whatever its priority. That one stays *promoted* for life: it is the victim only when
    all that run are promoted, and then it comes back before all who are not.

    The bound: a request with m older ones in line is admitted after at most k (m + 1)
    further admissions, plus k for each time that an older one is put back in line
    meanwhile. Proof: among k (m + 1) admissions in a row, m + 1 take the oldest in line.
    As long as the request waits, the oldest is it or one that is older, and the older ones
    are m; each of the m + 1 takes one of them out of line, so one takes the request. An
    older one that is preempted and put back is one more to take. There is no clock in it:
    where nothing is admitted, nothing can be promised.

    Args:
        promote_every: The k above; 1 makes this first come, first served.
    """

    def __init__(self, promote_every: int = 8) -> None:
        if promote_every < 1:
            raise ConfigError(
                f"promote_every is {promote_every}; it must be at least 1.", field="promote_every"
            )
        super().__init__()
        self._promote_every = promote_every
        self._by_arrival: LazyHeap[Request] = LazyHeap()  # the same requests as in the line
        self._num_admitted = 0
        self._promoted: set[Request] = set()

    def sort_key(self, request: Request) -> tuple[bool, int]:
        """Return promoted ones as smaller than all others, then by priority."""
        return request not in self._promoted, request.priority

    def peek(self) -> Request:
        """Return the most important request, or the oldest if it is its turn."""
        return self._by_arrival.peek() if self._is_turn_of_oldest() else self._line.peek()

    def pop(self) -> Request:
        """Take the request that `peek` shows."""
        request = self.peek()
        if self._is_turn_of_oldest():
            self._promoted.add(request)
        self._num_admitted += 1
        self._line.remove(request)
        self._by_arrival.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take any waiting request out of line."""
        self._by_arrival.remove(request)
        super().remove(request)

    def finish(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._promoted.discard(request)
        super().finish(request)

    def _enqueue(self, request: Request, *, is_new: bool) -> None:
        super()._enqueue(request, is_new=is_new)
        self._by_arrival.push(request, self.arrival(request))

    def _is_turn_of_oldest(self) -> bool:
        return self._num_admitted % self._promote_every == self._promote_every - 1
