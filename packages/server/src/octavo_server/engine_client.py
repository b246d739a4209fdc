"""The front's end of the engine: requests in, deltas out, and the engine's health."""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Self

import msgspec

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import (
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    QueueFullError,
    RequestFailedError,
)
from octavo_server.engine_link import EngineLink
from octavo_server.engine_process import EngineProcess
from octavo_server.metrics import ChoiceProgress, ServingMetrics
from octavo_server.output_processor import OutputProcessor
from octavo_server.request_ledger import RequestLedger
from octavo_server.request_output import OutputDelta
from octavo_server.supervisor import Supervisor

logger = logging.getLogger(__name__)

# Seconds that an engine which has said its last word gets to end its workers.
_END_SECONDS = 2.0
# An operator function waits for the step that runs; a long prefill takes its time.
_CALL_SECONDS = 120.0
# Deltas of one choice that wait for a slow reader are joined when they get this many.
_JOIN_DELTAS = 64
# Bytes that may wait for one reader. Text alone never gets there; with 20 log-probabilities a
# token, 200 tokens do.
MAX_PENDING_BYTES = 1 << 20
# One log-probability: the struct, two floats and ints, a text and its bytes.
_LOGPROB_BYTES = 220


class EngineState(enum.Enum):
    """Where the engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # it has crashed, and another one takes over what it had
    DEAD = "dead"


class EngineClient:
    """Talks to the engine, and keeps it alive. All methods belong to one event loop.

    Args:
        process: The engine process, already spawned.
        max_num_queued_reqs: Most answers in flight; further ones are refused.
        supervisor: Starts another process when one has crashed; without it, a crash is the end.

    Attributes:
        output_processor: Turns tokens into text. To be set before the first request.
        stage: What start-up is doing, in words.
        progress: How far that is, from 0 to 1, or None.
        stats: The engine's load after its last step.
        metrics: What was counted about all requests so far.
        limits: What the engine's start-up found, once it is done.
    """

    def __init__(
        self,
        process: EngineProcess,
        max_num_queued_reqs: int,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._max_num_queued_reqs = max_num_queued_reqs
        self._supervisor = supervisor
        self.output_processor: OutputProcessor | None = None
        self.state = EngineState.STARTING
        self.stage = "starting the engine process"
        self.progress: float | None = None
        self.stats = wire.SchedulerStats()
        self.metrics = ServingMetrics()
        self.limits: wire.Ready | None = None
        self._generations: dict[str, Generation] = {}
        self._ledger = RequestLedger()
        self._num_in_flight = 0
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._config: EngineConfig | None = None
        self._closing = False
        self._recovery: asyncio.Task[None] | None = None
        # Set when a step's outputs came while a new engine tries the old one's requests.
        self._progressed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[wire.Ready] = loop.create_future()
        self._death: asyncio.Future[OctavoError] = loop.create_future()
        self._link = EngineLink(process, self._handle, self._on_engine_end)

    @property
    def num_in_flight(self) -> int:
        """Answers that the engine still owes."""
        return self._num_in_flight

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of prompts that have no answer's token yet."""
        return self._ledger.num_waiting_tokens

    @property
    def num_restarts(self) -> int:
        """How many engines were started in place of one that had crashed."""
        return self._supervisor.num_restarts if self._supervisor is not None else 0

    def configure(self, config: EngineConfig) -> None:
        """Give the engine its configuration, now or as soon as it says hello."""
        self._config = config
        self._link.configure(config)

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
        """Wait until the engine has ended for good, and return why."""
        return await asyncio.shield(self._death)

    def generate(self, request_id: str, requests: Sequence[wire.EngineCoreRequest]) -> Generation:
        """Send `requests` to the engine as the choices of one API request.

        While an engine is replaced, they wait for the new one.

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
        if self.state not in (EngineState.READY, EngineState.RESTARTING):
            raise self._death.result() if self._death.done() else EngineDeadError("not started")
        assert self.output_processor is not None, "set output_processor before requests come"
        check_room(
            requests,
            num_in_flight=self._num_in_flight,
            num_waiting_tokens=self.num_waiting_tokens,
            config=self._config,
            limit=self._max_num_queued_reqs,
            metrics=self.metrics,
        )
        generation = Generation(
            self,
            request_id,
            [request.request_id for request in requests],
            self.metrics.start(requests),
        )
        self._generations[request_id] = generation
        self._num_in_flight += len(requests)
        is_ready = self.state is EngineState.READY
        for index, request in enumerate(requests):
            self.output_processor.add(request, request_id, index)
            self._ledger.add(request, is_sent=is_ready)
            if is_ready:
                self._send(wire.AddRequest(request))
        return generation

    async def call(self, method: str, *args: Any) -> Any:
        """Call one of the engine's operator functions, between two of its steps.

        Raises:
            EngineDeadError: The engine is not up.
            RequestFailedError: It refused, or did not answer in time.
        """
        if self.state is not EngineState.READY:
            raise self._death.result() if self._death.done() else EngineDeadError("not started")
        call_id = next(self._call_ids)
        answer = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self._send(wire.UtilityCall(call_id, method, list(args)))
        try:
            return await asyncio.wait_for(answer, _CALL_SECONDS)
        except TimeoutError:
            raise RequestFailedError(f"the engine did not answer to {method} in time") from None
        finally:
            self._calls.pop(call_id, None)

    def abort_requests(self, request_ids: Collection[str] | None) -> list[str]:
        """End requests with the finish reason ``abort``, which their clients are told.

        Args:
            request_ids: Of API requests, the client's own or ours, not of the engine's; None
                ends all.

        Returns:
            The ids of those that were in flight.
        """
        ended = []
        for generation in list(self._generations.values()):
            names = (generation.client_request_id or generation.request_id, generation.request_id)
            found = [name for name in names if request_ids is None or name in request_ids]
            if found:
                ended.append(found[0])
                self._end_early(generation)
        return ended

    def fail_all(self, error: OctavoError) -> None:
        """End every generation with `error`, and abort it in the engine."""
        for generation in list(self._generations.values()):
            generation.fail(error)

    async def close(self, grace: float = 3.0) -> None:
        """End the engine: ask it, give it `grace` seconds while it is up, then kill it."""
        self._closing = True
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait({self._recovery})
        if self._link.is_ready:
            self._send(wire.Shutdown())
        elif self._link.process.process.is_alive():
            self._link.process.process.terminate()
        self._fail(EngineDeadError("the server is shutting down"))
        await self._link.close(grace)

    def _end_early(self, generation: Generation) -> None:
        assert self.output_processor is not None
        unfinished, now = generation.unfinished, time.time()
        for index, engine_request_id in unfinished.items():
            self.output_processor.remove(engine_request_id)
            delta = OutputDelta(
                request_id=generation.request_id,
                index=index,
                text="",
                token_ids=[],
                finish_reason="abort",
            )
            self.metrics.add(generation.progress[index], delta, now)
            generation.put(delta)
        self._abort(list(unfinished.values()))

    def _send(self, message: wire.ToEngine) -> None:
        self._link.send(message)

    def _handle(self, message: wire.ToFront) -> None:
        match message:
            case wire.EngineCoreOutputs(outputs, stats):
                self.stats = stats or self.stats
                self._deliver(outputs)
            case wire.Loading(stage, progress):
                self.stage, self.progress = stage, progress
            case wire.Ready():
                self._on_ready(message)
            case wire.UtilityResult(call_id, result, problem):
                self._settle_call(call_id, result, problem)

    def _settle_call(self, call_id: int, result: Any, problem: str | None) -> None:
        answer = self._calls.get(call_id)
        if answer is None or answer.done():
            return  # nobody waits any more
        if problem is None:
            answer.set_result(result)
        else:
            answer.set_exception(RequestFailedError(problem))

    def _on_ready(self, ready: wire.Ready) -> None:
        if self._ready.done():
            self._recovery = asyncio.get_running_loop().create_task(self._resume())
            return
        self.limits = ready
        self._enter_ready()
        self._ready.set_result(ready)

    def _enter_ready(self) -> None:
        self.state = EngineState.READY
        self.stage, self.progress = "ready", 1.0

    def _deliver(self, outputs: list[wire.EngineCoreOutput]) -> None:
        if self.output_processor is None:
            return
        self._ledger.note(outputs)
        deltas, finished_early = self.output_processor.process(outputs)
        if finished_early:
            self._abort(finished_early)
        now = time.time()
        for delta in deltas:
            generation = self._generations.get(delta.request_id)
            if generation is not None:
                self.metrics.add(generation.progress[delta.index], delta, now)
                generation.put(delta)
        self.metrics.end_step()
        self._progressed.set()

    def _abort(self, engine_request_ids: list[str]) -> None:
        """Forget requests, and tell the engine if it has them."""
        self._ledger.remove(engine_request_ids)
        if self._link.is_ready:
            self._send(wire.AbortRequests(engine_request_ids))
        self._progressed.set()

    def _choice_ended(self) -> None:
        self._num_in_flight -= 1

    def _generation_ended(self, generation: Generation, unfinished: dict[int, str]) -> None:
        """Forget a generation, and abort its `unfinished` engine requests, by their index."""
        if self._generations.pop(generation.request_id, None) is None or not unfinished:
            return
        self._num_in_flight -= len(unfinished)
        reason = "abort" if generation.error is None else "error"
        assert self.output_processor is not None
        for index, engine_request_id in unfinished.items():
            self.output_processor.remove(engine_request_id)
            self.metrics.finish(generation.progress[index], reason, time.time())
        self._abort(list(unfinished.values()))

    # A crash, and what follows

    def _on_engine_end(self, error: OctavoError) -> None:
        """Start another engine if that makes sense, or give up."""
        if self._closing or self.state is EngineState.DEAD:
            return
        if self.state is EngineState.STARTING:
            self._fail(_with_stage(error, self.stage))
            return
        reason = "it is not replaced (--no-engine-restart)"
        if self._supervisor is not None:
            reason = self._supervisor.note_crash() or ""
        if reason:
            self._fail(EngineDeadError(f"{error}; {reason}"))
            return
        logger.error(
            "The engine has ended: %s. Starting another one for %d requests in flight",
            error,
            len(self._ledger),
        )
        self._fail_calls(EngineDeadError(f"{error}; another one is being started"))
        self.state = EngineState.RESTARTING
        self.stage, self.progress = "starting another engine process", None
        self.stats = wire.SchedulerStats()
        self._quarantine(self._ledger.note_crash())
        if self._recovery is not None:
            self._recovery.cancel()
        self._recovery = asyncio.get_running_loop().create_task(self._replace_engine())

    async def _replace_engine(self) -> None:
        assert self._supervisor is not None
        assert self._config is not None
        # The old one's memory has to be free before the new one looks how much there is. Tokens
        # that are still in its socket are computed again.
        await self._link.close(_END_SECONDS)
        try:
            process = self._supervisor.spawn()
        except OSError as error:
            self._fail(EngineDeadError(f"no other engine process can be started: {error}"))
            return
        self._link = EngineLink(process, self._handle, self._on_engine_end)
        self._link.configure(_with_limits(self._config, self._ready.result()))

    def _quarantine(self, engine_request_ids: list[str]) -> None:
        """Fail requests that were there at every crash."""
        for engine_request_id in engine_request_ids:
            logger.error("Request %s was in two crashes; it is failed", engine_request_id)
        self._deliver([_quarantined(request_id) for request_id in engine_request_ids])

    async def _resume(self) -> None:
        """Give the new engine all requests in flight: first one by one, then the rest.

        A request that makes the engine crash does so again when it comes to where it was, and
        then it is known who it was. Those tried before it go on meanwhile.
        """
        trials = self._ledger.trials()
        for number, trial in enumerate(trials):
            self.stage = "resuming the requests in flight"
            self.progress = number / len(trials)
            self._submit(self._ledger.unsent(trial))
            while not self._ledger.is_cleared(trial):
                self._progressed.clear()
                await self._progressed.wait()
        self._submit(self._ledger.unsent())
        self._enter_ready()
        logger.info("The new engine is ready and has %d requests in flight", len(self._ledger))

    def _submit(self, requests: list[wire.EngineCoreRequest]) -> None:
        for request in requests:
            self._send(wire.AddRequest(request))

    def _fail(self, error: OctavoError) -> None:
        """Enter the state DEAD, once, and end every generation with the reason."""
        if self.state is EngineState.DEAD:
            return
        # A failed start is told by `wait_ready`, and needs to be said only once.
        is_news = self._ready.done() and not self._closing
        self.state = EngineState.DEAD
        self.stage, self.progress = str(error), None
        self._death.set_result(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # Nobody may be waiting, which is no mistake.
        if is_news:
            logger.error("The engine has ended: %s", error)
        lost = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        self._fail_calls(lost)
        self.fail_all(lost)

    def _fail_calls(self, error: EngineDeadError) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)


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
        client: EngineClient,
        request_id: str,
        engine_request_ids: list[str],
        progress: list[ChoiceProgress],
    ) -> None:
        self._client = client
        self.request_id = request_id
        self.progress = progress
        self.client_request_id: str | None = None
        self.error: OctavoError | None = None
        self._unfinished = dict(enumerate(engine_request_ids))
        self._pending: dict[int, list[OutputDelta]] = {}
        self._num_pending_bytes = 0
        self._is_checking = False
        self._wake = asyncio.Event()

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
            self._client._choice_ended()
            if not self._unfinished:
                self.close()
        self._num_pending_bytes += _size_of(delta)
        self._wake.set()
        if self._num_pending_bytes > MAX_PENDING_BYTES and not self._is_checking:
            # Many steps may have come at once. The reader, if it waits for us, is before this in
            # the loop's line.
            self._is_checking = True
            asyncio.get_running_loop().call_soon(self._check_reader)

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
        self._client._generation_ended(self, unfinished)
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[list[OutputDelta]]:
        return self

    async def __anext__(self) -> list[OutputDelta]:
        while not self._pending:
            if self.error is not None:
                raise self.error
            if not self._unfinished:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
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


def check_room(
    requests: Sequence[wire.EngineCoreRequest],
    *,
    num_in_flight: int,
    num_waiting_tokens: int,
    config: EngineConfig | None,
    limit: int,
    metrics: ServingMetrics,
) -> None:
    """Refuse at once what would only wait; the engine may be busy with a step of seconds.

    Args:
        requests: Those that come.
        num_in_flight: Answers that are owed already.
        num_waiting_tokens: Of prompts that wait already.
        config: Of the engine, once it has one.
        limit: Most answers at a time.
        metrics: Counts those that are refused.

    Raises:
        QueueFullError: Too many answers are in flight, or too many tokens wait.
        InvalidRequestError: There are more choices than ever fit.
    """
    num_requests = len(requests)
    if num_requests > limit:
        raise InvalidRequestError(
            f"the request asks for {num_requests} answers (prompts × n); this server takes at "
            f"most {limit} at a time (--max-num-queued-reqs).",
            field="n",
        )
    if num_in_flight + num_requests > limit:
        metrics.reject("queue_full")
        raise QueueFullError(
            f"{num_in_flight} answers are in the queue already and this request asks for "
            f"{num_requests}; the server takes at most {limit} (--max-num-queued-reqs). "
            f"Try again later."
        )
    most_tokens = config.scheduler.max_num_queued_tokens if config is not None else 0
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    if most_tokens and num_waiting_tokens and num_waiting_tokens + num_tokens > most_tokens:
        metrics.reject("queue_full")
        raise QueueFullError(
            f"prompts of {num_waiting_tokens} tokens wait already and this request brings "
            f"{num_tokens}; the server takes at most {most_tokens} (--max-num-queued-tokens). "
            f"Try again later."
        )


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


def _with_stage(error: OctavoError, stage: str) -> OctavoError:
    """Say how far start-up was, where the engine itself could not."""
    return EngineDeadError(f"{error} while {stage}") if type(error) is EngineDeadError else error


def _with_limits(config: EngineConfig, ready: wire.Ready) -> EngineConfig:
    """Make another engine keep the limits that requests were let in by."""
    return config.replace(
        "the engine before",
        max_model_len=ready.max_model_len,
        num_gpu_blocks_override=ready.num_blocks or None,  # an encoder has none
    )


def _quarantined(engine_request_id: str) -> wire.EngineCoreOutput:
    return wire.EngineCoreOutput(
        engine_request_id,
        [],
        "error",
        error=(
            f"Request {engine_request_id} was in flight when the engine crashed, twice, and is not "
            f"tried again; the server's log has more."
        ),
        error_kind="RequestFailedError",
    )
