"""Several engines behind one front: the same model, each with a share of the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError, OctavoError
from octavo_core.router import LeastLoadedRouter, PrefixAffinityRouter, Router
from octavo_server.engine_handle import EngineState
from octavo_server.engine_keeper import EngineKeeper
from octavo_server.engine_process import EngineProcess, EngineSpawner
from octavo_server.supervisor import Supervisor

# What is true of the whole: the first of these that one of the engines is in. So it serves
# while any of them does, and is dead when all are.
_BEST_FIRST = (
    EngineState.READY,
    EngineState.RESTARTING,
    EngineState.ASLEEP,
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
    """An `EngineHandle` on several engines, which deals requests out to them.

    Prompts that start alike go to the engine that has their blocks, unless it has more than its
    share of the requests in flight. Each engine has its own keeper: when one crashes its
    requests wait for its successor, and new ones go to the others.

    Args:
        keepers: One for each engine.

    Attributes:
        keepers: One for each engine.
        limits: What any of the engines keeps, once all have started.
    """

    def __init__(self, keepers: Sequence[EngineKeeper]) -> None:
        self.keepers = tuple(keepers)
        self.limits: wire.Ready | None = None
        self._by_prefix: Router = PrefixAffinityRouter(len(keepers))
        self._by_load: Router = LeastLoadedRouter()

    @property
    def on_outputs(self) -> Callable[[list[wire.EngineCoreOutput]], None]:
        """Gets what each step of each engine brings, errors included."""
        return self.keepers[0].on_outputs

    @on_outputs.setter
    def on_outputs(self, on_outputs: Callable[[list[wire.EngineCoreOutput]], None]) -> None:
        for keeper in self.keepers:
            keeper.on_outputs = on_outputs

    @property
    def state(self) -> EngineState:
        """Where the engine is that is best off; while they start, the last of them."""
        states = {keeper.state for keeper in self.keepers}
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
        return sum_stats([keeper.stats for keeper in self.keepers])

    @property
    def num_in_flight(self) -> int:
        """Requests that were added and have not ended."""
        return sum(keeper.num_in_flight for keeper in self.keepers)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of prompts that have no answer's token yet."""
        return sum(keeper.num_waiting_tokens for keeper in self.keepers)

    @property
    def num_restarts(self) -> int:
        """How many engines were started in place of crashed ones."""
        return sum(keeper.num_restarts for keeper in self.keepers)

    def configure(self, config: EngineConfig) -> None:
        """Give each engine its configuration, now or as soon as it says hello."""
        for index, keeper in enumerate(self.keepers):
            keeper.configure(_config_of(config, index))

    def report_stage(self, stage: str, progress: float | None) -> None:
        """Show what the front itself is doing, until the engines have something to tell."""
        for keeper in self.keepers:
            keeper.report_stage(stage, progress)

    async def wait_ready(self) -> wire.Ready:
        """Wait until all engines can take requests.

        Returns:
            The limits that any of them keeps.

        Raises:
            OctavoError: One of them could not start.
        """
        found = await asyncio.gather(*(keeper.wait_ready() for keeper in self.keepers))
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
        waiting = [asyncio.ensure_future(keeper.wait_dead()) for keeper in self.keepers]
        try:
            last: OctavoError = EngineDeadError("there is no engine")
            for ended in asyncio.as_completed(waiting):
                last = await ended
            return last
        finally:
            for task in waiting:
                task.cancel()

    def add(self, requests: Sequence[wire.EngineCoreRequest]) -> None:
        """Start the choices of one API request on one of the engines.

        Raises:
            EngineDeadError: All engines have ended.
        """
        self.keepers[self._route(requests[0].prompt_token_ids)].add(requests)

    def abort(self, engine_request_ids: Sequence[str]) -> None:
        """End requests whose clients have left, wherever they run."""
        for keeper in self.keepers:
            keeper.abort(engine_request_ids)

    async def call(self, method: str, *args: Any) -> Any:
        """Call an operator function of each engine; returns what the first one answers.

        Those that have ended for good are left out, as long as others serve.

        Raises:
            EngineDeadError: One of the engines is not up.
            RequestFailedError: One refused, or did not answer in time.
        """
        alive = [keeper for keeper in self.keepers if keeper.state is not EngineState.DEAD]
        calls = (keeper.call(method, *args) for keeper in alive or self.keepers)
        answers = await asyncio.gather(*calls)
        return answers[0]

    async def close(self, grace: float = 3.0) -> None:
        """End the engines together: ask them, give them `grace` seconds, then kill them."""
        await asyncio.gather(*(keeper.close(grace) for keeper in self.keepers))

    def _route(self, prompt_token_ids: Sequence[int]) -> int:
        """Choose an engine that takes requests; one that is just replaced only if none does."""
        loads = [keeper.num_in_flight for keeper in self.keepers]
        states = [keeper.state for keeper in self.keepers]
        if all(state is EngineState.READY for state in states):
            return self._by_prefix.route(prompt_token_ids, loads)
        best = self.state
        able = [index for index, state in enumerate(states) if state is best]
        return able[self._by_load.route(prompt_token_ids, [loads[index] for index in able])]

    def _slowest(self) -> EngineKeeper:
        """Return the engine that is furthest from serving, and of those the least far."""
        behind = [keeper for keeper in self.keepers if keeper.state is self.state]
        return min(behind, key=lambda keeper: keeper.progress or 0.0)


def keep_engines(
    processes: Sequence[EngineProcess], spawners: Sequence[EngineSpawner], config: EngineConfig
) -> EngineKeeper | EngineGroup:
    """Return a handle on engines that are starting.

    Args:
        processes: One for each engine, already spawned.
        spawners: What has spawned them, and starts their successors.
        config: Says whether there are to be any.
    """
    restarts = config.server.engine_restart
    keepers = [
        EngineKeeper(process, Supervisor(spawner.spawn, restarts=restarts))
        for process, spawner in zip(processes, spawners, strict=True)
    ]
    return keepers[0] if len(keepers) == 1 else EngineGroup(keepers)


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
