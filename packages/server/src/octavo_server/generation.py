"""The answers to one API request as they come from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol, Self

import msgspec

from octavo_core.errors import OctavoError, RequestFailedError
from octavo_server.metrics import ChoiceProgress
from octavo_server.request_output import OutputDelta

# Deltas of one choice that wait for a slow reader are joined when they get this many.
_JOIN_DELTAS = 64
# Bytes that may wait for one reader. Text alone never gets there; with 20 log-probabilities a
# token, 200 tokens do.
MAX_PENDING_BYTES = 1 << 20
# One log-probability: the struct, two floats and ints, a text and its bytes.
_LOGPROB_BYTES = 220


class GenerationOwner(Protocol):
    """Who began a generation, and is told how it goes."""

    def choice_ended(self) -> None:
        """Take note that one choice is complete."""
        ...

    def generation_ended(self, generation: Generation, unfinished: dict[int, str]) -> None:
        """Forget a generation, and abort its `unfinished` engine requests, by their index."""
        ...


class Generation:
    """The answers to one API request as they come: an async iterator over lists of deltas.

    A list holds at most one delta for each choice: a reader that falls behind gets fewer
    and longer ones. One for which more than `MAX_PENDING_BYTES` wait has stopped reading: its
    request ends.

    Attributes:
        progress: For each choice, when what happened to it.
        client_request_id: The ``X-Request-Id`` that the request came with, if it has one.
        error: Why all that was not finished has failed, if it has.
    """

    def __init__(
        self,
        owner: GenerationOwner,
        request_id: str,
        engine_request_ids: list[str],
        progress: list[ChoiceProgress],
    ) -> None:
        self._owner = owner
        self.request_id = request_id
        self.progress = progress
        self.client_request_id: str | None = None
        self.error: OctavoError | None = None
        self._unfinished = dict(enumerate(engine_request_ids))
        self._pending: dict[int, list[OutputDelta]] = {}
        self._num_pending_bytes = 0
        self._is_checking = False
        self._loop = asyncio.get_running_loop()
        # Of a reader that waits. A bare future: an asyncio.Event would cost 2 µs a token.
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unfinished(self) -> dict[int, str]:
        """The engine's ids of the choices that are not complete, by their index."""
        return dict(self._unfinished)

    def put(self, delta: OutputDelta) -> None:
        """Take one delta from the engine."""
        waiting = self._pending.setdefault(delta.index, [])
        waiting.append(delta)
        if len(waiting) >= _JOIN_DELTAS and delta.error is None:
            waiting[:] = [join_deltas(waiting)]
        if delta.finish_reason is not None and self._unfinished.pop(delta.index, None) is not None:
            self._owner.choice_ended()
            if not self._unfinished:
                self.close()
        self._num_pending_bytes += _size_of(delta)
        self._wake()
        if self._num_pending_bytes > MAX_PENDING_BYTES and not self._is_checking:
            # Many steps may have come at once. The reader, if it waits for us, is before this in
            # the loop's line.
            self._is_checking = True
            self._loop.call_soon(self._check_reader)

    def _check_reader(self) -> None:
        """Give up on a reader that does not read, and let go of what waits for it."""
        self._is_checking = False
        if self._num_pending_bytes <= MAX_PENDING_BYTES:
            return
        self._pending.clear()
        self._num_pending_bytes = 0
        self.error = RequestFailedError(
            f"more than {MAX_PENDING_BYTES} bytes of the answer waited for the client to read them"
        )
        self.close()

    def fail(self, error: OctavoError) -> None:
        """Raise `error` to the reader once it has read what came before."""
        if self._unfinished:
            self.error = error
        self.close()

    def close(self) -> None:
        """Abort every choice that is not finished. Does nothing the second time."""
        unfinished, self._unfinished = self._unfinished, {}
        self._owner.generation_ended(self, unfinished)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[list[OutputDelta]]:
        return self

    async def __anext__(self) -> list[OutputDelta]:
        while not self._pending:
            if self.error is not None:
                raise self.error
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        pending, self._pending = self._pending, {}
        self._num_pending_bytes = 0
        for index, deltas in pending.items():
            if deltas[-1].error is not None and len(deltas) > 1:
                # The reader gets what came before the error first, however late it is.
                self._pending[index] = [deltas.pop()]
        return [join_deltas(deltas) for deltas in pending.values()]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()


def join_deltas(deltas: list[OutputDelta]) -> OutputDelta:
    """Join consecutive deltas of one choice into one."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return msgspec.structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs if any(delta.logprobs is not None for delta in deltas) else None,
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
        prompt_logprobs=deltas[0].prompt_logprobs,
        scheduled_time=max(delta.scheduled_time for delta in deltas),
        num_preemptions=max(delta.num_preemptions for delta in deltas),
    )


def _size_of(delta: OutputDelta) -> int:
    """Estimate the memory of what a delta brings; `_JOIN_DELTAS` bounds the rest."""
    size = len(delta.text) + 36 * len(delta.token_ids)  # an int and its place in a list
    for position in delta.logprobs or ():
        size += _LOGPROB_BYTES * (1 + len(position.top))
    return size
