"""Several engines behind one front."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_core.wire import SchedulerStats
from octavo_server.engine_group import sum_stats
from support.front import FrontUnderTest
from support.server import children_of, command_line


def test_stats_of_several_engines() -> None:
    total = sum_stats(
        [
            SchedulerStats(num_running=2, kv_cache_usage=0.5, prefix_cache_hits=7),
            SchedulerStats(num_running=3, kv_cache_usage=0.25, num_waiting=1),
        ]
    )
    assert (total.num_running, total.num_waiting, total.prefix_cache_hits) == (5, 1, 7)
    assert total.kv_cache_usage == pytest.approx(0.375)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("group")
    settings: dict[str, Any] = {"data_parallel_size": 2, "enable_operator_routes": "true"}
    front = FrontUnderTest(folder, "run_scripted_engine", **settings)
    yield front.wait_ready()
    front.stop()


def complete(front: Any, prompt: str) -> str:
    response = front.post("/v1/completions", {"prompt": prompt, "max_tokens": 200})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def engines_of(front: Any) -> list[Any]:
    engines: list[Any] = httpx.get(front.url + "/health").json()["engines"]
    return engines


def engine_pids(front: Any) -> list[int]:
    return [pid for pid in children_of(front.process.pid) if command_line(pid) == "octavo: engine"]


def test_requests_are_spread_and_answered_as_by_one_engine(front: Any) -> None:
    prompts = [f"{number} slow and steady wins the race" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, front, prompt) for prompt in prompts]
        busiest = [0, 0]
        while not all(answer.done() for answer in answers):
            found = [engine["num_in_flight"] for engine in engines_of(front)]
            busiest = [max(*pair) for pair in zip(busiest, found, strict=True)]
            time.sleep(0.02)
    assert [answer.result() for answer in answers] == prompts
    # Bounded loads: none has more than 1.25 times its share, rounded up.
    assert min(busiest) >= 3
    assert max(busiest) <= 5
    assert [engine["num_in_flight"] for engine in engines_of(front)] == [0, 0]


def test_an_engine_that_is_killed_is_replaced_while_the_other_serves(front: Any) -> None:
    pids = engine_pids(front)
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    deadline = time.monotonic() + 20
    restarts = 0
    while not restarts:
        assert time.monotonic() < deadline
        assert httpx.get(front.url + "/health").status_code == 200
        assert complete(front, "still here") == "still here"
        restarts = sum(engine["num_restarts"] for engine in engines_of(front))
    while {engine["state"] for engine in engines_of(front)} != {"ready"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_engines_sleep_and_wake_up_where_one_of_them_is_gone_for_good(front: Any) -> None:
    """The last test of this front, as the engine does not come back."""
    others = engine_pids(front)[1:]
    deadline = time.monotonic() + 60
    while "dead" not in {engine["state"] for engine in engines_of(front)}:
        assert time.monotonic() < deadline
        for pid in set(engine_pids(front)) - set(others):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for route in ("sleep", "wake_up"):
        response = httpx.post(f"{front.url}/{route}", timeout=20)
        assert response.json() == {"is_sleeping": route == "sleep"}, response.text
    assert complete(front, "still here") == "still here"
