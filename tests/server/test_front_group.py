"""Several front processes on one address: a client can't tell them from one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo_core.errors import ConfigError
from octavo_server.front_group import bind_sockets
from octavo_server.http_counts import HTTPCounts
from octavo_server.metrics import ServingMetrics
from octavo_server.metrics_report import add_report, report_of, sum_reports
from support.front import FrontUnderTest
from support.scripted_pooling import EMBEDDER, normalized, vector_of
from support.server import children_of, command_line, is_running

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
LIMIT = 8


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    running = FrontUnderTest(
        tmp_path_factory.mktemp("group"),
        "run_scripted_engine",
        api_server_count=2,
        enable_operator_routes="true",
        max_num_queued_reqs=LIMIT,
        api_key="sk-group",
    )
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def send(front: Any, method: str, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
    """Send a request on a connection of its own, which any of the fronts may get."""
    headers = {"Authorization": "Bearer sk-group", **kwargs.pop("headers", {})}
    return httpx.request(
        method, front.url + path, json=body, headers=headers, timeout=20, verify=False, **kwargs
    )


def respond_on_each(front: Any, **fields: Any) -> list[dict[str, Any]]:
    """Have each of the two fronts make a response; their ids tell which one it was."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(60):
        answer = send(front, "POST", RESPONSES, {"input": "hi", "max_output_tokens": 8, **fields})
        assert answer.status_code == 200, answer.text
        found[answer.json()["id"].removeprefix("resp_")[:2]] = answer.json()
        if len(found) == 2:
            return list(found.values())
    raise AssertionError("all connections went to one front")


def processes(front: Any, name: str) -> list[int]:
    children = children_of(front.process.pid)
    return [pid for pid in children if command_line(pid).startswith(f"octavo: {name}")]


def stream(front: Any, prompt: str) -> str:
    """Return the text of a stream, all of whose events are there."""
    body = {"prompt": prompt, "max_tokens": 400, "stream": True}
    text = send(front, "POST", COMPLETIONS, body).text
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert all("error" not in event for event in events), events[-1]
    return "".join(event["choices"][0]["text"] for event in events)


def counter(front: Any, name: str) -> float:
    page = send(front, "GET", "/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if re.match(name, line))


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_processes(front: Any) -> None:
    assert command_line(front.process.pid) == "octavo: hub"
    assert len(processes(front, "engine")) == 1
    assert len(processes(front, "front")) == 2
    assert "torch" not in Path(f"/proc/{front.process.pid}/maps").read_text()
    assert (
        send(front, "GET", "/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401
    )


def test_metrics_are_whole_whichever_front_tells_them(front: Any) -> None:
    tokens, answers = "vllm:generation_tokens_total", "vllm:request_success_total"
    before = counter(front, tokens), counter(front, answers)
    for _ in range(2):
        respond_on_each(front)
    made = counter(front, answers) - before[1]
    assert made >= 4
    for _ in range(6):
        assert counter(front, answers) == before[1] + made
        assert counter(front, tokens) >= before[0] + 2 * made
        assert counter(front, "vllm:num_requests_running") == 0


def test_a_stored_response_is_found_by_every_front(front: Any) -> None:
    for response in respond_on_each(front):
        url = f"{RESPONSES}/{response['id']}"
        for _ in range(5):
            assert send(front, "GET", url).json() == response
        listed = send(front, "GET", f"{url}/input_items").json()["data"]
        assert listed[0]["content"][0]["text"] == "hi"
        for _ in range(4):  # one that goes on is kept where the first one is
            more = {"input": "more", "previous_response_id": response["id"]}
            following = send(front, "POST", RESPONSES, more).json()
            assert following["previous_response_id"] == response["id"]
            assert following["id"][:7] == response["id"][:7]
        assert send(front, "DELETE", url).json()["deleted"] is True
        for _ in range(4):
            assert send(front, "GET", url).status_code == 404


def test_a_job_in_the_background_is_followed_and_cancelled_by_every_front(front: Any) -> None:
    for job in respond_on_each(front, input="slow" * 60, max_output_tokens=200, background=True):
        url = f"{RESPONSES}/{job['id']}"
        with ThreadPoolExecutor(6) as pool:
            follow = [
                pool.submit(send, front, "GET", url, params={"stream": "true"}) for _ in range(5)
            ]
            wait_for(lambda url=url: bool(send(front, "GET", url).json()["output"]))
            assert send(front, "POST", f"{url}/cancel").json()["status"] == "cancelled"
            texts = {answer.result().text for answer in follow}
        assert len(texts) == 1
        assert "response.output_text.delta" in texts.pop()
    wait_for(lambda: counter(front, "vllm:num_requests_running") == 0)


def test_the_limit_of_requests_holds_for_all_fronts_together(front: Any) -> None:
    with ThreadPoolExecutor(LIMIT) as pool:
        running = [pool.submit(stream, front, f"{i} slow" * 7) for i in range(LIMIT)]
        wait_for(lambda: counter(front, "vllm:num_requests_running") == LIMIT)
        for _ in range(6):
            refused = send(front, "POST", COMPLETIONS, {"prompt": "x"})
            assert refused.status_code == 429, refused.text
            assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
        assert [text.result() for text in running] == [f"{i} slow" * 7 for i in range(LIMIT)]
    assert counter(front, "vllm:admission_rejections_total") >= 6


def test_operator_routes_reach_every_front(front: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = [
            pool.submit(
                send, front, "POST", COMPLETIONS, {"prompt": "slow" * 90, "max_tokens": 400}
            )
            for _ in range(8)
        ]
        wait_for(lambda: counter(front, "vllm:num_requests_running") == 8)
        aborted = send(front, "POST", "/abort_requests").json()["aborted"]
        assert len(aborted) == 8
        assert {r.result().json()["choices"][0]["finish_reason"] for r in running} == {"abort"}
    for level in (0, 1):
        assert send(front, "POST", f"/sleep?level={level}").json() == {"is_sleeping": True}
        for _ in range(6):
            assert send(front, "POST", COMPLETIONS, {"prompt": "x"}).status_code == 503
        assert len(processes(front, "engine")) == (0 if level else 1)
        assert send(front, "POST", "/wake_up").json() == {"is_sleeping": False}
        for _ in range(6):
            assert send(front, "POST", COMPLETIONS, {"prompt": "x"}).status_code == 200
    assert send(front, "POST", "/reset_prefix_cache").status_code == 200


def test_texts_are_pooled_through_every_front(start_front: Any) -> None:
    """Vectors are as with one front; the engine's crash and the limit concern all of them."""
    front = start_front(
        "run_pooling",
        model=EMBEDDER,
        api_server_count=2,
        max_num_queued_reqs=LIMIT,
        max_num_seqs=1,
    ).wait_ready()
    texts = ["face", "bad egg", "cabbage"]
    vectors = [pytest.approx(normalized(vector_of(text)), abs=1e-6) for text in texts]

    def embed(inputs: list[str]) -> httpx.Response:
        return send(front, "POST", "/v1/embeddings", {"input": inputs})

    def data(inputs: list[str]) -> list[list[float]]:
        return [item["embedding"] for item in embed(inputs).json()["data"]]

    for _ in range(12):  # so many connections reach both fronts
        assert data(texts) == vectors
    ranked = send(front, "POST", "/rerank", {"query": "a", "documents": ["b", "a"]}).json()
    assert [result["index"] for result in ranked["results"]] == [1, 0]
    assert send(front, "POST", COMPLETIONS, {"prompt": "x"}).json()["error"]["code"] == (
        "unsupported_api"
    )
    assert counter(front, "vllm:request_success_total") == 12 * len(texts) + 3
    assert embed(["a"] * (LIMIT + 1)).status_code == 400
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(data, [f"slow {text}" for text in texts]) for _ in range(2)]
        wait_for(lambda: counter(front, "vllm:num_requests_waiting") > 0)
        os.kill(processes(front, "engine")[0], signal.SIGKILL)
        assert [answer.result() for answer in running] == [vectors] * 2
    assert counter(front, "vllm:engine_restarts_total") == 1


def test_an_engine_that_is_killed_is_replaced_under_all_fronts(front: Any) -> None:
    prompts = [f"{i} slow and steady wins" * 3 for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(stream, front, prompt) for prompt in prompts]
        wait_for(lambda: counter(front, "vllm:num_requests_running") == 4)
        os.kill(processes(front, "engine")[0], signal.SIGKILL)
        assert [text.result() for text in running] == prompts
    assert counter(front, "vllm:engine_restarts_total") == 1
    wait_for(lambda: send(front, "GET", "/health").status_code == 200)


def test_a_front_that_is_killed_is_replaced(front: Any) -> None:
    """What it answered is lost with it; the others' streams, and what was counted, are not."""
    here = respond_on_each(front)
    wait_for(lambda: counter(front, "vllm:num_requests_running") == 0)
    before = counter(front, "vllm:request_success_total")
    time.sleep(1.2)  # it reports every second
    victim = next(pid for pid in processes(front, "front") if command_line(pid).endswith("0"))
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not is_running(victim))
    # Those that the dead one would have got wait for its successor.
    for number in range(8):
        assert stream(front, f"{number} still here") == f"{number} still here"
    wait_for(lambda: len(processes(front, "front")) == 2)
    assert counter(front, "vllm:request_success_total") == before + 8
    statuses = {
        r["id"][5:7]: send(front, "GET", f"{RESPONSES}/{r['id']}").status_code for r in here
    }
    assert statuses["01"] == 200
    assert statuses["00"] in (404, 503)
    respond_on_each(front)
    assert "front 0 ended with signal 9" in front.stderr
    assert "Traceback" not in front.stderr


def test_a_signal_drains_all_fronts(start_front: Any) -> None:
    front = start_front(api_server_count=2).wait_ready()
    pids = [front.process.pid, *children_of(front.process.pid)]
    prompts = [f"{i} slow" * 15 for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(stream, front, prompt) for prompt in prompts]
        wait_for(lambda: counter(front, "vllm:num_requests_running") == 6)
        front.process.send_signal(signal.SIGTERM)
        assert [text.result() for text in running] == prompts
    assert front.process.wait(timeout=20) == 0
    wait_for(lambda: not any(is_running(pid) for pid in pids))
    assert "Traceback" not in front.stderr


def test_a_front_that_is_just_being_started_again_drains_too(start_front: Any) -> None:
    front = start_front(api_server_count=2, shutdown_timeout=60).wait_ready()
    victim = processes(front, "front")[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: "another one is started" in front.stderr)
    front.process.send_signal(signal.SIGTERM)
    assert front.process.wait(timeout=40) == 0
    assert "Traceback" not in front.stderr


def test_without_its_hub_nothing_is_left(start_front: Any) -> None:
    front = start_front(api_server_count=2).wait_ready()
    pids = [front.process.pid, *children_of(front.process.pid)]
    front.process.kill()
    wait_for(lambda: not any(is_running(pid) for pid in pids), 10)


def test_an_engine_that_ends_for_good_ends_all(start_front: Any) -> None:
    front = start_front(api_server_count=2, engine_restart="false").wait_ready()
    pids = children_of(front.process.pid)
    answer = send(front, "POST", COMPLETIONS, {"prompt": "die, engine", "max_tokens": 50})
    assert answer.json()["error"]["code"] == "engine_dead"
    assert front.process.wait(timeout=20) == 1
    wait_for(lambda: not any(is_running(pid) for pid in pids))
    assert "Traceback" not in front.stderr


def test_a_model_that_can_not_be_loaded_is_one_line(start_front: Any) -> None:
    front = start_front("run_broken_model", api_server_count=2)
    assert front.process.wait(timeout=30) == 1
    assert front.stderr.splitlines() == ["error: tensor x has the wrong shape."]


def test_a_port_in_use_is_found_though_sockets_share() -> None:
    """Case C13: another server with several fronts must not join in unnoticed."""
    shared = bind_sockets("127.0.0.1", 0, 2)
    try:
        port = shared[0].getsockname()[1]
        assert {one.getsockname()[1] for one in shared} == {port}
        with pytest.raises(ConfigError, match=f"port {port}: address already in use"):
            bind_sockets("127.0.0.1", port, 2)
    finally:
        for one in shared:
            one.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind_sockets("127.0.0.1", other.getsockname()[1], 2)


def test_reports_add_up() -> None:
    metrics, http = ServingMetrics(), HTTPCounts()
    metrics.num_generation_tokens = 7
    metrics.finished["stop"] = 2
    metrics.reject("queue_full")
    metrics.time_to_first_token.observe(0.3)
    http.add("GET", "/health", 200, 0.2)
    report = report_of(metrics, http)
    both = sum_reports([report, report])
    assert both == sum_reports([both])
    total, total_http = ServingMetrics(), HTTPCounts()
    add_report(total, total_http, both)
    assert total.num_generation_tokens == 14
    assert (total.finished["stop"], total.rejections["queue_full"]) == (4, 2)
    assert (total.time_to_first_token.count, total.time_to_first_token.sum) == (2, 0.6)
    assert total_http.requests["GET", "/health", 200] == 2
    assert total_http.durations["GET", "/health"].count == 2
