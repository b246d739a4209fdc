"""Replays a trace through replicas of the real scheduler, on a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from octavo_core.block_manager import BlockManager
from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError
from octavo_core.policies import load_policy
from octavo_core.router import make_router
from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler import Scheduler
from octavo_core.simulator.cost_model import CostModel
from octavo_core.simulator.measurements import Measurements
from octavo_core.simulator.replica import Replica
from octavo_core.simulator.report import Report, make_report
from octavo_core.simulator.trace import PromptMaker, TraceEntry
from octavo_core.wire import EngineCoreRequest


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace is replayed on.

    Attributes:
        cost_model: How long a step takes on one replica's device.
        num_blocks: KV blocks of each replica.
        max_model_len: Most tokens of a request.
        config: Scheduler and cache settings; all other groups are ignored.
        num_host_blocks: Blocks of each replica's host tier.
        num_replicas: Engines behind the router.
        router: One of `octavo_core.router.ROUTERS`.
        router_key_tokens: Prompt tokens that prefix_affinity looks at.
        router_load_factor: How much more than the mean load it lets a replica have.
        seed: Of the router's own choices.
    """

    cost_model: CostModel
    num_blocks: int
    max_model_len: int
    config: EngineConfig = EngineConfig()
    num_host_blocks: int = 0
    num_replicas: int = 1
    router: str = "least_loaded"
    router_key_tokens: int = 128
    router_load_factor: float = 1.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "num_replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least 1.", field=name
                )


def simulate(trace: Iterable[TraceEntry], deployment: Deployment) -> Report:
    """Replay a trace to its end.

    Equal arguments give equal reports. Memory grows with the requests in flight, not with
    the trace.

    Args:
        trace: Arrivals in order of time.
        deployment: What they arrive at.

    Raises:
        ConfigError: The deployment names something that there is not.
        TraceError: The trace can't be read to its end.
    """
    return Simulation(deployment).run(trace)


class Simulation:
    """The event loop: arrivals on one side, ends of steps on the other.

    Attributes:
        replicas: The engines, for a look at their schedulers.
        measurements: What they have counted so far.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.measurements = Measurements()
        self.replicas = [self._make_replica() for _ in range(deployment.num_replicas)]
        self._router = make_router(
            deployment.router,
            deployment.num_replicas,
            seed=deployment.seed,
            num_key_tokens=deployment.router_key_tokens,
            load_factor=deployment.router_load_factor,
        )
        self._loads = [0] * deployment.num_replicas
        self._prompts = PromptMaker()
        self._params: dict[int, SamplingParams] = {}
        self._events: list[tuple[float, int]] = []  # when which replica's step ends or begins
        self._is_idle = [True] * deployment.num_replicas

    def run(self, trace: Iterable[TraceEntry]) -> Report:
        """Replay a trace to its end, and report."""
        events = self._events
        for entry in trace:
            # What ends at the very moment of an arrival has seen it: the engine reads its
            # socket before it schedules.
            while events and events[0][0] < entry.time:
                self._advance()
            self._arrive(entry)
        while events:
            self._advance()
        assert not any(replica.has_work for replica in self.replicas), "a request never ends"
        return make_report(
            self.measurements,
            [replica.scheduler.stats() for replica in self.replicas],
            [replica.num_routed for replica in self.replicas],
        )

    def _arrive(self, entry: TraceEntry) -> None:
        measurements = self.measurements
        prompt = self._prompts.make(entry, measurements.num_requests)
        index = self._router.route(prompt, self._loads) if len(self._loads) > 1 else 0
        request = EngineCoreRequest(
            str(measurements.num_requests),
            prompt,
            self._sampling_params(entry.output_tokens),
            arrival_time=entry.time,
            priority=entry.priority,
            tenant=entry.user,
        )
        measurements.num_requests += 1
        replica = self.replicas[index]
        if not replica.add_request(request, entry.time):
            return
        measurements.num_input_tokens += len(prompt)
        self._loads[index] += 1
        if self._is_idle[index]:
            self._is_idle[index] = False
            heapq.heappush(self._events, (entry.time, index))

    def _advance(self) -> None:
        """End the step that ends first, and begin its replica's next one."""
        now, index = self._events[0]
        replica = self.replicas[index]
        if replica.is_computing:
            replica.finish_step()
            self._loads[index] = replica.num_unfinished
        end = replica.start_step(now) if replica.has_work else None
        if end is None:
            # Nothing to compute until something arrives.
            heapq.heappop(self._events)
            self._is_idle[index] = True
        else:
            heapq.heapreplace(self._events, (end, index))

    def _make_replica(self) -> Replica:
        config, deployment = self.deployment.config, self.deployment
        blocks = BlockManager(
            deployment.num_blocks,
            config.cache.block_size,
            config.cache.enable_prefix_caching,
            num_host_blocks=deployment.num_host_blocks,
            max_step_tokens=config.scheduler.max_num_batched_tokens,
        )
        policy = load_policy(config.scheduler.scheduling_policy)
        scheduler = Scheduler(config.scheduler, blocks, deployment.max_model_len, policy)
        return Replica(scheduler, deployment.cost_model, self.measurements)

    def _sampling_params(self, max_tokens: int) -> SamplingParams:
        """Return shared parameters: checking new ones takes as long as scheduling a request."""
        params = self._params.get(max_tokens)
        if params is None:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
            self._params[max_tokens] = params
        return params
