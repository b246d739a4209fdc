"""The front's end of the engine: requests in, deltas out, and the engine's health."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import (
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    QueueFullError,
    error_named,
)
from octavo_server.engine_process import EngineProcess
from octavo_server.output_processor import OutputProcessor
from octavo_server.request_output import OutputDelta

logger = logging.getLogger(__name__)

# Seconds that a last message of an engine that just ended may still need through the socket.
_LAST_WORD_SECONDS = 0.2
# Deltas of one choice that wait for a slow reader are joined when they get this many.
_JOIN_DELTAS = 64


class EngineState(enum.Enum):
    """Where the engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineClient:
    """Talks to one engine process. All methods belong to one event loop.

    Args:
        process: The engine process, already spawned.
        max_num_queued_reqs: Most answers in flight; further ones are refused.

    Attributes:
        output_processor: Turns tokens into text. To be set before the first request.
        stage: What start-up is doing, in words.
        progress: How far that is, from 0 to 1, or None.
        stats: The engine's load after its last step.
    """

    def __init__(self, process: EngineProcess, max_num_queued_reqs: int) -> None:
        self._process = process
        self._max_num_queued_reqs = max_num_queued_reqs
        self.output_processor: OutputProcessor | None = None
        self.state = EngineState.STARTING
        self.stage = "starting the engine process"
        self.progress: float | None = None
        self.stats = wire.SchedulerStats()
        self._generations: dict[str, Generation] = {}
        self._num_in_flight = 0
        self._identity: bytes | None = None
        self._config: EngineConfig | None = None
        self._closing = False
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[wire.Ready] = loop.create_future()
        self._death: asyncio.Future[OctavoError] = loop.create_future()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A ROUTER drops what doesn't fit; the number of requests is bounded here instead.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.bind(process.address)
        self._tasks = [loop.create_task(self._read())]
        loop.add_reader(process.process.sentinel, self._on_process_end)

    @property
    def num_in_flight(self) -> int:
        """Answers that the engine still owes."""
        return self._num_in_flight

    def configure(self, config: EngineConfig) -> None:
        """Give the engine its configuration, now or as soon as it says hello."""
        self._config = config
        self._configure_if_met()

    def report_stage(self, stage: str, progress: float | None) -> None:
        """Show what the front itself is doing, until the engine has something to tell."""
        if self.state is EngineState.STARTING:
            self.stage, self.progress = stage, progress

    async def wait_ready(self) -> wire.Ready:
        """Wait until the engine can take requests.

        Raises:
            OctavoError: Start-up failed; the class is the one that the engine named.
        """
        return await asyncio.shield(self._ready)

    async def wait_dead(self) -> OctavoError:
        """Wait until the engine has ended, and return why."""
        return await asyncio.shield(self._death)

    def generate(self, request_id: str, requests: Sequence[wire.EngineCoreRequest]) -> Generation:
        """Send `requests` to the engine as the choices of one API request.

        Args:
            request_id: Unique; the deltas carry it.
            requests: One for each choice, in the order of their index.

        Returns:
            An iterator over the steps' deltas. Leave its ``async with`` block, or close it, to
            abort what is not finished.

        Raises:
            QueueFullError: Too many answers are in flight.
            InvalidRequestError: There are more choices than ever fit.
            EngineDeadError: The engine has ended.
        """
        if self.state is not EngineState.READY:
            raise self._death.result() if self._death.done() else EngineDeadError("not started")
        assert self.output_processor is not None, "set output_processor before requests come"
        self._check_room(len(requests))
        generation = Generation(self, request_id, [request.request_id for request in requests])
        self._generations[request_id] = generation
        self._num_in_flight += len(requests)
        for index, request in enumerate(requests):
            self.output_processor.add(request, request_id, index)
            self._send(wire.AddRequest(request))
        return generation

    def fail_all(self, error: OctavoError) -> None:
        """End every generation with `error`, and abort it in the engine."""
        for generation in list(self._generations.values()):
            generation.fail(error)

    async def close(self, grace: float = 3.0) -> None:
        """End the engine: ask it, give it `grace` seconds while it is up, then kill it."""
        self._closing = True
        asyncio.get_running_loop().remove_reader(self._process.process.sentinel)
        if self.state is EngineState.READY:
            self._send(wire.Shutdown())
        elif self._process.process.is_alive():
            self._process.process.terminate()
        self._fail(EngineDeadError("the server is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._process.end, grace)
        self._context.destroy(linger=0)

    def _check_room(self, num_requests: int) -> None:
        limit = self._max_num_queued_reqs
        if num_requests > limit:
            raise InvalidRequestError(
                f"the request asks for {num_requests} answers (prompts × n); this server takes at "
                f"most {limit} at a time (--max-num-queued-reqs).",
                field="n",
            )
        if self._num_in_flight + num_requests > limit:
            raise QueueFullError(
                f"{self._num_in_flight} answers are in the queue already and this request asks for "
                f"{num_requests}; the server takes at most {limit} (--max-num-queued-reqs). "
                f"Try again later."
            )

    def _configure_if_met(self) -> None:
        if self._identity is not None and self._config is not None:
            self._send(wire.Configure(self._config))

    def _send(self, message: wire.ToEngine) -> None:
        assert self._identity is not None
        # Without a high-water mark a send never waits, so its future is done already.
        self._socket.send_multipart([self._identity, wire.encode(message)])

    async def _read(self) -> None:
        try:
            while True:
                identity, frame = await self._socket.recv_multipart()
                self._handle(identity, wire.decode_to_front(frame))
        except Exception as error:
            logger.exception("The link to the engine broke")
            self._fail(EngineDeadError(f"the link to the engine broke: {error}"))

    def _handle(self, identity: bytes, message: wire.ToFront) -> None:
        match message:
            case wire.EngineCoreOutputs(outputs, stats):
                self.stats = stats or self.stats
                self._deliver(outputs)
            case wire.Hello():
                self._identity = identity
                self._configure_if_met()
            case wire.Loading(stage, progress):
                self.stage, self.progress = stage, progress
            case wire.Ready():
                self.state = EngineState.READY
                self.stage, self.progress = "ready", 1.0
                if not self._ready.done():
                    self._ready.set_result(message)
            case wire.Failed():
                self._fail(_error_of(message))
            case wire.UtilityResult():
                logger.warning("Unexpected UtilityResult %d", message.call_id)

    def _deliver(self, outputs: list[wire.EngineCoreOutput]) -> None:
        if self.output_processor is None:
            return
        deltas, finished_early = self.output_processor.process(outputs)
        if finished_early:
            self._send(wire.AbortRequests(finished_early))
        for delta in deltas:
            generation = self._generations.get(delta.request_id)
            if generation is not None:
                generation.put(delta)

    def _choice_ended(self) -> None:
        self._num_in_flight -= 1

    def _generation_ended(self, request_id: str, unfinished: list[str]) -> None:
        """Forget a generation, and abort its `unfinished` engine requests."""
        if self._generations.pop(request_id, None) is None or not unfinished:
            return
        self._num_in_flight -= len(unfinished)
        assert self.output_processor is not None
        for engine_request_id in unfinished:
            self.output_processor.remove(engine_request_id)
        if self.state is EngineState.READY:
            self._send(wire.AbortRequests(unfinished))

    def _on_process_end(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.process.sentinel)
        self._tasks.append(loop.create_task(self._await_last_word()))

    async def _await_last_word(self) -> None:
        # The engine may have said why; that message is better than an exit code.
        await asyncio.sleep(_LAST_WORD_SECONDS)
        stage = f" while {self.stage}" if self.state is EngineState.STARTING else ""
        self._fail(EngineDeadError(self._process.describe_end() + stage))

    def _fail(self, error: OctavoError) -> None:
        """Enter the state DEAD, once, and end every generation with the reason."""
        if self.state is EngineState.DEAD:
            return
        # A failed start is told by `wait_ready`, and needs to be said only once.
        is_news = self.state is EngineState.READY and not self._closing
        self.state = EngineState.DEAD
        self.stage, self.progress = str(error), None
        self._death.set_result(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # Nobody may be waiting, which is no mistake.
        if is_news:
            logger.error("The engine has ended: %s", error)
        self.fail_all(error if isinstance(error, EngineDeadError) else EngineDeadError(str(error)))


class Generation:
    """The answers to one API request as they come: an async iterator over lists of deltas.

    A list holds at most one delta for each choice: a reader that falls behind gets fewer
    and longer ones, so what waits for it is bounded by the answer itself.
    """

    def __init__(
        self, client: EngineClient, request_id: str, engine_request_ids: list[str]
    ) -> None:
        self._client = client
        self._request_id = request_id
        self._unfinished = dict(enumerate(engine_request_ids))
        self._pending: dict[int, list[OutputDelta]] = {}
        self._error: OctavoError | None = None
        self._wake = asyncio.Event()

    def put(self, delta: OutputDelta) -> None:
        """Take one delta from the engine."""
        waiting = self._pending.setdefault(delta.index, [])
        waiting.append(delta)
        if len(waiting) >= _JOIN_DELTAS and delta.error is None:
            waiting[:] = [join_deltas(waiting)]
        if delta.finish_reason is not None and self._unfinished.pop(delta.index, None) is not None:
            self._client._choice_ended()
            if not self._unfinished:
                self.close()
        self._wake.set()

    def fail(self, error: OctavoError) -> None:
        """Raise `error` to the reader once it has read what came before."""
        if self._unfinished:
            self._error = error
        self.close()

    def close(self) -> None:
        """Abort every choice that is not finished. Does nothing the second time."""
        unfinished, self._unfinished = list(self._unfinished.values()), {}
        self._client._generation_ended(self._request_id, unfinished)
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[list[OutputDelta]]:
        return self

    async def __anext__(self) -> list[OutputDelta]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, {}
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
    )


def _error_of(failed: wire.Failed) -> OctavoError:
    return error_named(failed.kind, failed.message, failed.field, default=EngineDeadError)
