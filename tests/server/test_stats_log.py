"""The line about load and throughput, in the words that tools look for."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from octavo_core.wire import SchedulerStats
from octavo_server.metrics import ServingMetrics
from octavo_server.stats_log import StatsMeter

LINE = re.compile(
    r"Engine 000: Avg prompt throughput: ([\d.]+) tokens/s, "
    r"Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs, Waiting: (\d+) reqs, "
    r"GPU KV cache usage: ([\d.]+)%, Prefix cache hit rate: ([\d.]+)%(.*)"
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def make_client() -> Any:
    return SimpleNamespace(metrics=ServingMetrics(), stats=SchedulerStats())


def read(meter: StatsMeter) -> tuple[tuple[str, ...], bool]:
    line, is_idle = meter.read()
    match = LINE.fullmatch(line)
    assert match is not None, line
    return match.groups(), is_idle


def test_rates_are_those_since_the_last_line(clock: list[float]) -> None:
    client = make_client()
    meter = StatsMeter(client)
    client.metrics.num_prompt_tokens = 500
    client.metrics.num_generation_tokens = 50
    client.stats = SchedulerStats(2, 1, 0.25, 3, prefix_cache_queries=400, prefix_cache_hits=100)
    clock[0] += 10
    assert read(meter) == (("50.0", "5.0", "2", "1", "25.0", "25.0", ", Preemptions: 3"), False)
    clock[0] += 10
    client.stats = SchedulerStats(1, 0)
    client.metrics.num_generation_tokens = 90
    assert read(meter) == (("0.0", "4.0", "1", "0", "0.0", "0.0", ""), False)


def test_the_end_of_the_work_is_told_once(clock: list[float]) -> None:
    client = make_client()
    meter = StatsMeter(client)
    idle = []
    for num_running in (0, 1, 0, 0):
        client.stats = SchedulerStats(num_running)
        clock[0] += 10
        idle.append(read(meter)[1])
    assert idle == [True, False, False, True]


def test_a_new_engine_starts_its_totals_again(clock: list[float]) -> None:
    client = make_client()
    client.stats = SchedulerStats(prefix_cache_queries=400, prefix_cache_hits=100)
    meter = StatsMeter(client)
    client.stats = SchedulerStats(prefix_cache_queries=10, prefix_cache_hits=5)
    clock[0] += 10
    assert read(meter)[0][5] == "0.0"
