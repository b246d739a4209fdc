"""Several engines behind one front: the same model, each with a share of the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError, OctavoError
from octavo_core.router import LeastLoadedRouter, PrefixAffinityRouter, Router
from octavo_server.engine_client import EngineClient, EngineState, Generation, check_room
from octavo_server.output_processor import OutputProcessor

# What is true of the whole: the first of these that one of the engines is in. So it serves
# while any of them does, and is dead when all are.
_BEST_FIRST = (
    EngineState.READY,
    EngineState.RESTARTING,
    EngineState.STARTING,
    EngineState.DEAD,
)
_SUMMED = tuple(
    field for field in wire.SchedulerStats.__struct_fields__ if not field.endswith("_usage")
)
_AVERAGED = tuple(
    field for field in wire.SchedulerStats.__struct_fields__ if field.endswith("_usage")
)


class EngineGroup:
    """Looks like one `EngineClient`, and deals requests out to several.

    Prompts that start alike go to the engine that has their blocks, unless it has more than its
    share of the requests in flight. Each engine is supervised by its own client: when one
    crashes its requests wait for its successor, and new ones go to the others.

    Args:
        clients: One for each engine.
        max_num_queued_reqs: Most answers in flight, over all engines.

    Attributes:
        clients: One for each engine.
        metrics: What was counted about all requests so far.
        limits: What any of the engines keeps, once all have started.
    """

    def __init__(self, clients: Sequence[EngineClient], max_num_queued_reqs: int) -> None:
        self.clients = tuple(clients)
        self._max_num_queued_reqs = max_num_queued_reqs
        # Requests are counted together, whichever engine they go to.
        self.metrics = clients[0].metrics
        for client in clients:
            client.metrics = self.metrics
        self.limits: wire.Ready | None = None
        self._config: EngineConfig | None = None
        self._by_prefix: Router = PrefixAffinityRouter(len(clients))
        self._by_load: Router = LeastLoadedRouter()

    @property
    def output_processor(self) -> OutputProcessor | None:
        """Turns tokens into text, for all engines. To be set before the first request."""
        return self.clients[0].output_processor

    @output_processor.setter
    def output_processor(self, output_processor: OutputProcessor) -> None:
        for client in self.clients:
            client.output_processor = output_processor

    @property
    def state(self) -> EngineState:
        """Where the engine is that is best off; while they start, the last of them."""
        states = {client.state for client in self.clients}
        if EngineState.STARTING in states and EngineState.DEAD not in states:
            return EngineState.STARTING
        return next(state for state in _BEST_FIRST if state in states)

    @property
    def stage(self) -> str:
        """What start-up is doing, in words, on the engine that is behind."""
        return self._slowest().stage

    @property
    def progress(self) -> float | None:
        """How far that is, from 0 to 1, or None."""
        return self._slowest().progress

    @property
    def stats(self) -> wire.SchedulerStats:
        """The load of all engines: counts are sums, and shares in use are means."""
        return sum_stats([client.stats for client in self.clients])

    @property
    def num_in_flight(self) -> int:
        """Answers that the engines still owe."""
        return sum(client.num_in_flight for client in self.clients)

    @property
    def num_restarts(self) -> int:
        """How many engines were started in place of crashed ones."""
        return sum(client.num_restarts for client in self.clients)

    def configure(self, config: EngineConfig) -> None:
        """Give each engine its configuration, now or as soon as it says hello."""
        self._config = config
        for index, client in enumerate(self.clients):
            client.configure(_config_of(config, index))

    def report_stage(self, stage: str, progress: float | None) -> None:
        """Show what the front itself is doing, until the engines have something to tell."""
        for client in self.clients:
            client.report_stage(stage, progress)

    async def wait_ready(self) -> wire.Ready:
        """Wait until all engines can take requests.

        Returns:
            The limits that any of them keeps.

        Raises:
            OctavoError: One of them could not start.
        """
        found = await asyncio.gather(*(client.wait_ready() for client in self.clients))
        self.limits = msgspec.structs.replace(
            found[0],
            max_model_len=min(ready.max_model_len for ready in found),
            num_blocks=min(ready.num_blocks for ready in found),
            kv_cache_tokens=min(ready.kv_cache_tokens for ready in found),
            max_concurrency=sum(ready.max_concurrency for ready in found),
        )
        return self.limits

    async def wait_dead(self) -> OctavoError:
        """Wait until all engines have ended for good, and return why the last one has."""
        waiting = [asyncio.ensure_future(client.wait_dead()) for client in self.clients]
        try:
            last: OctavoError = EngineDeadError("there is no engine")
            for ended in asyncio.as_completed(waiting):
                last = await ended
            return last
        finally:
            for task in waiting:
                task.cancel()

    def generate(self, request_id: str, requests: Sequence[wire.EngineCoreRequest]) -> Generation:
        """Send `requests` to one of the engines; see `EngineClient.generate`.

        Raises:
            QueueFullError: Too many answers are in flight.
            InvalidRequestError: There are more choices than ever fit.
            EngineDeadError: All engines have ended.
        """
        check_room(
            requests,
            num_in_flight=self.num_in_flight,
            num_waiting_tokens=sum(client.num_waiting_tokens for client in self.clients),
            config=self._config,
            limit=self._max_num_queued_reqs,
            metrics=self.metrics,
        )
        client = self.clients[self._route(requests[0].prompt_token_ids)]
        return client.generate(request_id, requests)

    async def call(self, method: str, *args: Any) -> Any:
        """Call an operator function of each engine; returns what the first one answers.

        Raises:
            EngineDeadError: One of the engines is not up.
            RequestFailedError: One refused, or did not answer in time.
        """
        answers = await asyncio.gather(*(client.call(method, *args) for client in self.clients))
        return answers[0]

    def abort_requests(self, request_ids: Collection[str] | None) -> list[str]:
        """End requests, or all of them; see `EngineClient.abort_requests`."""
        ended: list[str] = []
        for client in self.clients:
            ended += client.abort_requests(request_ids)
        return ended

    def fail_all(self, error: OctavoError) -> None:
        """End every generation with `error`, and abort it in its engine."""
        for client in self.clients:
            client.fail_all(error)

    async def close(self, grace: float = 3.0) -> None:
        """End the engines together: ask them, give them `grace` seconds, then kill them."""
        await asyncio.gather(*(client.close(grace) for client in self.clients))

    def _route(self, prompt_token_ids: Sequence[int]) -> int:
        """Choose an engine that takes requests; one that is just replaced only if none does."""
        loads = [client.num_in_flight for client in self.clients]
        states = [client.state for client in self.clients]
        if all(state is EngineState.READY for state in states):
            return self._by_prefix.route(prompt_token_ids, loads)
        best = self.state
        able = [index for index, state in enumerate(states) if state is best]
        return able[self._by_load.route(prompt_token_ids, [loads[index] for index in able])]

    def _slowest(self) -> EngineClient:
        """Return the engine that is furthest from serving, and of those the least far."""
        behind = [client for client in self.clients if client.state is self.state]
        return min(behind, key=lambda client: client.progress or 0.0)


def sum_stats(stats: Sequence[wire.SchedulerStats]) -> wire.SchedulerStats:
    """Add up loads: counts are sums, and shares in use are means."""
    totals = {name: sum(getattr(one, name) for one in stats) for name in _SUMMED}
    means = {name: sum(getattr(one, name) for one in stats) / len(stats) for name in _AVERAGED}
    return wire.SchedulerStats(**totals, **means)


def _config_of(config: EngineConfig, index: int) -> EngineConfig:
    """Return one engine's configuration: an endpoint can't be bound twice."""
    endpoint = config.cache.kv_events_endpoint
    if endpoint is None or index == 0:
        return config
    scheme, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        own = f"{scheme}:{int(port) + index}"
    else:
        own = f"{endpoint}-{index}"
    return config.replace("its place among the engines", kv_events_endpoint=own)
