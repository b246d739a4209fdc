"""Questions that went over a socket, and whose answers come some time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from octavo_core.errors import OctavoError, RequestFailedError


class PendingCalls:
    """Brings answers to those who asked. All methods belong to one event loop.

    Args:
        first_id: Number of the first call. Where answers to a process that is gone may reach
            another one in its place, both have to start at numbers of their own.
    """

    def __init__(self, first_id: int = 1) -> None:
        self._ids = itertools.count(first_id)
        self._calls: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, send: Callable[[int], None], name: str, timeout: float | None) -> Any:
        """Send a question, and return its answer.

        Args:
            send: Sends it under the number that it is given.
            name: What is asked, for the error.
            timeout: Seconds to wait; None is for ever.

        Raises:
            RequestFailedError: It was refused, or there was no answer in time.
            OctavoError: The error of `fail_all`.
        """
        call_id = next(self._ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            send(call_id)
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise RequestFailedError(f"{name} got no answer in time") from None
        finally:
            self._calls.pop(call_id, None)

    def settle(self, call_id: int, result: Any, problem: str | None = None) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        answer = self._calls.get(call_id)
        if answer is None or answer.done():
            return
        if problem is None:
            answer.set_result(result)
        else:
            answer.set_exception(RequestFailedError(problem))

    def fail_all(self, error: OctavoError) -> None:
        """Have all questions end with an error."""
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
