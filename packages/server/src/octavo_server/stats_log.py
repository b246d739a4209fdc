"""The line about load and throughput that is logged every few seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from octavo_core.wire import SchedulerStats
from octavo_server.engine_handle import EngineState
from octavo_server.metrics import ServingMetrics

logger = logging.getLogger(__name__)


class LoadSource(Protocol):
    """What knows the load: an engine's client, or the hub of several fronts."""

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        ...

    @property
    def stats(self) -> SchedulerStats:
        """The engine's load after its last step."""
        ...

    @property
    def metrics(self) -> ServingMetrics:
        """What was counted about all requests so far."""
        ...


async def log_stats(client: LoadSource, interval: float) -> None:
    """Log a line every `interval` seconds, at level debug while nothing is going on."""
    meter = StatsMeter(client)
    while True:
        await asyncio.sleep(interval)
        if client.state is EngineState.READY:
            line, is_idle = meter.read()
            logger.log(logging.DEBUG if is_idle else logging.INFO, "%s", line)


class StatsMeter:
    """Turns totals into rates since it was last read."""

    def __init__(self, client: LoadSource) -> None:
        self._client = client
        self._read_at = time.monotonic()
        self._totals = self._read_totals()
        self._was_idle = True

    def read(self) -> tuple[str, bool]:
        """Return the line, and whether both this interval and the last one were idle.

        The first line after the end of the work shows that it has ended.
        """
        now = time.monotonic()
        totals = self._read_totals()
        seconds = max(now - self._read_at, 1e-9)
        prompt, generated, queries, hits = (
            max(0, new - old) for new, old in zip(totals, self._totals, strict=True)
        )
        self._read_at, self._totals = now, totals
        stats = self._client.stats
        is_idle = not (prompt or generated or stats.num_running or stats.num_waiting)
        was_idle, self._was_idle = self._was_idle, is_idle
        line = (
            f"Engine 000: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"GPU KV cache usage: {stats.kv_cache_usage * 100:.1f}%, "
            f"Prefix cache hit rate: {100 * hits / max(1, queries):.1f}%"
        )
        if stats.num_preemptions:
            line += f", Preemptions: {stats.num_preemptions}"
        return line, is_idle and was_idle

    def _read_totals(self) -> tuple[int, int, int, int]:
        metrics, stats = self._client.metrics, self._client.stats
        return (
            metrics.num_prompt_tokens,
            metrics.num_generation_tokens,
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
        )
