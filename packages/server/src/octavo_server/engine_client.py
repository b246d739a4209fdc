"""The front's end of the engine: requests in, deltas out."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import (
    InvalidRequestError,
    OctavoError,
    QueueFullError,
)
from octavo_server.engine_handle import EngineHandle, EngineState
from octavo_server.generation import Generation
from octavo_server.metrics import ServingMetrics
from octavo_server.output_processor import OutputProcessor
from octavo_server.request_output import OutputDelta


class EngineClient:
    """Turns requests into generations. All methods belong to one event loop.

    Args:
        engine: What computes them.
        max_num_queued_reqs: Most answers in flight; further ones are refused.

    Attributes:
        engine: What computes the requests.
        output_processor: Turns tokens into text. To be set before the first request.
        metrics: What was counted about all requests so far.
    """

    def __init__(self, engine: EngineHandle, max_num_queued_reqs: int) -> None:
        self.engine = engine
        self._max_num_queued_reqs = max_num_queued_reqs
        self.output_processor: OutputProcessor | None = None
        self.metrics = ServingMetrics()
        self._generations: dict[str, Generation] = {}
        self._num_in_flight = 0
        self._config: EngineConfig | None = None
        engine.on_outputs = self._deliver

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self.engine.state

    @property
    def stage(self) -> str:
        """What start-up is doing, in words."""
        return self.engine.stage

    @property
    def progress(self) -> float | None:
        """How far that is, from 0 to 1, or None."""
        return self.engine.progress

    @property
    def stats(self) -> wire.SchedulerStats:
        """The engine's load after its last step."""
        return self.engine.stats

    @property
    def limits(self) -> wire.Ready | None:
        """What the engine's start-up found, once it is done."""
        return self.engine.limits

    @property
    def num_restarts(self) -> int:
        """How many engines were started in place of one that had crashed."""
        return self.engine.num_restarts

    @property
    def num_in_flight(self) -> int:
        """Answers that the engine still owes to us."""
        return self._num_in_flight

    def configure(self, config: EngineConfig) -> None:
        """Give the engine its configuration, now or as soon as it says hello."""
        self._config = config
        self.engine.configure(config)

    def report_stage(self, stage: str, progress: float | None) -> None:
        """Show what the front itself is doing, until the engine has something to tell."""
        self.engine.report_stage(stage, progress)

    async def wait_ready(self) -> wire.Ready:
        """Wait until the engine can take requests; see `EngineHandle.wait_ready`."""
        return await self.engine.wait_ready()

    async def wait_dead(self) -> OctavoError:
        """Wait until the engine has ended for good, and return why."""
        return await self.engine.wait_dead()

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
        assert self.output_processor is not None, "set output_processor before requests come"
        check_room(
            requests,
            num_in_flight=self._num_in_flight,
            num_waiting_tokens=self.engine.num_waiting_tokens,
            config=self._config,
            limit=self._max_num_queued_reqs,
            metrics=self.metrics,
        )
        self.engine.add(requests)
        generation = Generation(
            self,
            request_id,
            [request.request_id for request in requests],
            self.metrics.start(requests),
        )
        self._generations[request_id] = generation
        self._num_in_flight += len(requests)
        for index, request in enumerate(requests):
            self.output_processor.add(request, request_id, index)
        return generation

    async def call(self, method: str, *args: Any) -> Any:
        """Call one of the engine's operator functions; see `EngineHandle.call`."""
        return await self.engine.call(method, *args)

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
        """End the engine, and every generation with an error; see `EngineHandle.close`."""
        await self.engine.close(grace)

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
        self.engine.abort(list(unfinished.values()))

    def _deliver(self, outputs: list[wire.EngineCoreOutput]) -> None:
        if self.output_processor is None:
            return
        deltas, finished_early = self.output_processor.process(outputs)
        if finished_early:
            self.engine.abort(finished_early)
        now = time.time()
        for delta in deltas:
            generation = self._generations.get(delta.request_id)
            if generation is not None:
                self.metrics.add(generation.progress[delta.index], delta, now)
                generation.put(delta)
        self.metrics.end_step()

    def choice_ended(self) -> None:
        """Take note that one choice is complete."""
        self._num_in_flight -= 1

    def generation_ended(self, generation: Generation, unfinished: dict[int, str]) -> None:
        """Forget a generation, and abort its `unfinished` engine requests, by their index."""
        if self._generations.pop(generation.request_id, None) is None or not unfinished:
            return
        self._num_in_flight -= len(unfinished)
        reason = "abort" if generation.error is None else "error"
        assert self.output_processor is not None
        for index, engine_request_id in unfinished.items():
            self.output_processor.remove(engine_request_id)
            self.metrics.finish(generation.progress[index], reason, time.time())
        self.engine.abort(list(unfinished.values()))


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
