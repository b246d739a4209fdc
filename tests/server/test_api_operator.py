"""The routes that act on the whole server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from octavo_core.config import EngineConfig, resolve_config
from octavo_server.api.app import create_app
from octavo_server.engine_handle import EngineState
from support.asgi import call, guarded_app, loading_context
from support.server import children_of, command_line, is_running

SLOW = {"prompt": "slow" * 100, "max_tokens": 400}


@pytest.fixture(scope="module")
def operated(start_shared_front: Any) -> Any:
    return start_shared_front(enable_operator_routes="true").wait_ready()


def post(front: Any, target: str, **kwargs: Any) -> httpx.Response:
    return httpx.post(front.url + target, timeout=20, **kwargs)


def cached_tokens(front: Any, prompt: str) -> int:
    response = front.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_the_prefix_cache_is_reset(operated: Any) -> None:
    prompt = "the same beginning of some length"
    cached_tokens(operated, prompt)
    assert cached_tokens(operated, prompt) == 32
    assert post(operated, "/reset_prefix_cache").json() == {"status": "ok"}
    assert cached_tokens(operated, prompt) == 0


def children_named(front: Any, name: str) -> list[int]:
    return [pid for pid in children_of(front.process.pid) if command_line(pid).startswith(name)]


def metric(front: Any, name: str) -> float:
    (line,) = [
        line
        for line in httpx.get(front.url + "/metrics").text.splitlines()
        if line.startswith(name)
    ]
    return float(line.rpartition(" ")[2])


class Stream:
    """One streamed answer, read by a thread."""

    def __init__(self, front: Any, headers: dict[str, str] | None = None) -> None:
        self.request_id = ""
        self.headers = headers or {}
        self.events: list[Any] = []
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(front,))
        self.thread.start()
        assert self.started.wait(10)

    def _read(self, front: Any) -> None:
        body = SLOW | {"stream": True}
        url = front.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, headers=self.headers, timeout=30) as stream:
            self.request_id = stream.headers["x-request-id"]
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                self.started.set()

    @property
    def finish_reason(self) -> str:
        self.thread.join(20)
        return str(self.events[-1]["choices"][0]["finish_reason"])


def test_requests_are_aborted_by_id_and_all_at_once(operated: Any) -> None:
    first, second, third = (Stream(operated) for _ in range(3))
    body = {"request_ids": [first.request_id, "unknown"]}
    assert post(operated, "/abort_requests", json=body).json() == {"aborted": [first.request_id]}
    assert first.finish_reason == "abort"
    ended = post(operated, "/abort_requests").json()["aborted"]
    assert sorted(ended) == sorted([second.request_id, third.request_id])
    assert second.finish_reason == third.finish_reason == "abort"
    assert post(operated, "/abort_requests").json() == {"aborted": []}
    assert post(operated, "/abort_requests", json={"request_ids": 5}).status_code == 400
    text = httpx.get(operated.url + "/metrics").text
    assert 'finished_reason="abort",model_name="bytes"} 3.0' in text


def test_a_request_is_aborted_by_the_id_that_its_client_gave_it(operated: Any) -> None:
    ids = ["mine", "hers", "another's"]
    mine, hers, other = (Stream(operated, {"X-Request-Id": name}) for name in ids)
    answer_id = hers.events[0]["id"]
    aborted = post(operated, "/abort_requests", json={"request_ids": ["mine", answer_id]})
    assert sorted(aborted.json()["aborted"]) == sorted(["mine", answer_id])
    assert mine.finish_reason == hers.finish_reason == "abort"
    assert post(operated, "/abort_requests").json() == {"aborted": ["another's"]}
    assert other.finish_reason == "abort"


def test_a_sleeping_server_takes_no_requests(operated: Any) -> None:
    stream = Stream(operated)
    assert post(operated, "/sleep?level=0").json() == {"is_sleeping": True}
    try:
        assert stream.finish_reason == "abort"
        refused = operated.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "sleeping"
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(operated.url + "/is_sleeping").json() == {"is_sleeping": True}
        assert httpx.get(operated.url + "/health").status_code == 200
        assert httpx.get(operated.url + "/ready").status_code == 503
        assert httpx.get(operated.url + "/v1/models").status_code == 200
        asleep = 'engine_sleep_state{engine="0",model_name="bytes",sleep_state="awake"} 0.0'
        assert asleep in httpx.get(operated.url + "/metrics").text
    finally:
        assert post(operated, "/wake_up").json() == {"is_sleeping": False}
    assert operated.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert httpx.get(operated.url + "/ready").status_code == 200


@pytest.mark.parametrize(("level", "state"), [(1, "weights_offloaded"), (2, "discard_all")])
def test_a_deep_sleep_frees_the_engine(operated: Any, level: int, state: str) -> None:
    """The process is gone, and all its memory with it; another one serves after it."""
    stream = Stream(operated)
    (engine,) = children_named(operated, "octavo: engine")
    restarts = metric(operated, "vllm:engine_restarts_total")
    assert post(operated, f"/sleep?level={level}").json() == {"is_sleeping": True}
    assert stream.finish_reason == "abort"
    assert not is_running(engine)
    assert post(operated, f"/sleep?level={level}").json() == {"is_sleeping": True}
    assert operated.post("/v1/completions", {"prompt": "x"}).json()["error"]["code"] == "sleeping"
    health = httpx.get(operated.url + "/health")
    assert (health.status_code, health.json()["status"]) == (200, "sleeping")
    assert httpx.get(operated.url + "/ready").status_code == 503
    assert post(operated, "/reset_prefix_cache").status_code == 200
    sleep_state = f'vllm:engine_sleep_state{{engine="0",model_name="bytes",sleep_state="{state}"}}'
    assert metric(operated, sleep_state) == 1
    assert post(operated, "/wake_up?tags=weights&tags=kv_cache").json() == {"is_sleeping": False}
    answer = operated.post("/v1/completions", {"prompt": "good morning"}).json()
    assert answer["choices"][0]["text"] == "good morning"
    assert children_named(operated, "octavo: engine") != [engine]
    assert metric(operated, "vllm:engine_restarts_total") == restarts
    assert metric(operated, sleep_state) == 0


def test_several_engines_sleep_and_wake_up_together(start_front: Any) -> None:
    front = start_front(enable_operator_routes="true", data_parallel_size=2).wait_ready()
    engines = children_named(front, "octavo: engine")
    assert len(engines) == 2
    assert post(front, "/sleep").json() == {"is_sleeping": True}
    assert not any(map(is_running, engines))
    states = [engine["state"] for engine in httpx.get(front.url + "/health").json()["engines"]]
    assert states == ["asleep", "asleep"]
    assert post(front, "/wake_up").json() == {"is_sleeping": False}
    states = [engine["state"] for engine in httpx.get(front.url + "/health").json()["engines"]]
    assert states == ["ready", "ready"]
    for text in ("one", "two", "three", "four"):
        answer = front.post("/v1/completions", {"prompt": text}).json()
        assert answer["choices"][0]["text"] == text


def test_an_engine_that_is_killed_while_it_wakes_up_is_replaced(start_front: Any) -> None:
    front = start_front("run_reluctant_engine", enable_operator_routes="true").wait_ready()
    assert post(front, "/sleep").json() == {"is_sleeping": True}
    waking = threading.Thread(target=post, args=(front, "/wake_up"))
    waking.start()
    while not (engines := children_named(front, "octavo: engine")):
        time.sleep(0.01)
    assert httpx.get(front.url + "/health").json()["status"] == "sleeping"
    os.kill(engines[0], signal.SIGKILL)
    waking.join(30)
    assert front.post("/v1/completions", {"prompt": "still here"}).status_code == 200
    assert metric(front, "vllm:engine_restarts_total") == 1


def test_a_server_that_is_asleep_ends_when_it_is_told_to(start_front: Any) -> None:
    front = start_front(enable_operator_routes="true", engine_restart="false").wait_ready()
    assert post(front, "/sleep").json() == {"is_sleeping": True}
    assert post(front, "/wake_up").json() == {"is_sleeping": False}
    assert post(front, "/sleep").json() == {"is_sleeping": True}
    assert front.stop() == 0
    assert "Traceback" not in front.stderr


def test_a_sleep_waits_for_an_engine_that_is_just_being_replaced(operated: Any) -> None:
    """It was told to free the memory, and a new engine would take it again."""
    assert post(operated, "/sleep?level=0").json() == {"is_sleeping": True}
    (engine,) = children_named(operated, "octavo: engine")
    os.kill(engine, signal.SIGKILL)
    while httpx.get(operated.url + "/health").json()["stage"] == "ready":
        time.sleep(0.01)
    assert post(operated, "/sleep?level=1").json() == {"is_sleeping": True}
    assert children_named(operated, "octavo: engine") == []
    assert post(operated, "/wake_up").json() == {"is_sleeping": False}
    answer = operated.post("/v1/completions", {"prompt": "good morning"}).json()
    assert answer["choices"][0]["text"] == "good morning"


def test_a_server_that_wakes_up_does_not_wait_for_it_to_end(start_front: Any) -> None:
    front = start_front("run_reluctant_engine", enable_operator_routes="true").wait_ready()
    assert post(front, "/sleep").json() == {"is_sleeping": True}
    with ThreadPoolExecutor(1) as pool:
        waking = pool.submit(post, front, "/wake_up")
        while httpx.get(front.url + "/health").json()["stage"] == "asleep":
            time.sleep(0.01)
        assert front.stop() == 0
        answer = waking.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert "Traceback" not in front.stderr


def test_an_engine_that_sleeps_is_not_taken_for_ready() -> None:
    """However a call to wake up and one to sleep got in each other's way."""
    context = loading_context(EngineConfig())
    context.client.state = EngineState.ASLEEP
    app = create_app(context)
    assert call(app, "GET", "/ready").json()["status"] == "sleeping"
    refused = call(app, "POST", "/v1/completions")
    assert refused.json()["error"]["code"] == "sleeping"


def test_sleep_can_wait_for_what_runs(operated: Any) -> None:
    stream = Stream(operated)
    started = time.monotonic()
    sleeping = threading.Thread(target=post, args=(operated, "/sleep?level=0&mode=wait"))
    sleeping.start()
    assert stream.finish_reason == "length"
    sleeping.join(10)
    assert not sleeping.is_alive()
    assert time.monotonic() - started > 0.5
    post(operated, "/wake_up")


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("/wake_up?tags=weights", 400, "come back together"),
        ("/sleep?level=3", 400, "0, 1 or 2"),
        ("/sleep?level=-0", 400, "level"),
        ("/sleep?level=0&mode=keep", 400, "abort or wait"),
        ("/v1/load_lora_adapter", 501, "not supported yet"),
        ("/v1/unload_lora_adapter", 501, "not supported yet"),
    ],
)
def test_what_can_not_be_done(operated: Any, target: str, status: int, words: str) -> None:
    response = post(operated, target)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


def test_a_web_page_can_not_operate_the_server(operated: Any) -> None:
    headers = {"Origin": "https://evil.example"}
    for target in ("/sleep?level=0", "/abort_requests", "/reset_prefix_cache", "/wake_up"):
        assert post(operated, target, headers=headers).status_code == 403
    assert httpx.get(operated.url + "/is_sleeping").json() == {"is_sleeping": False}


def test_without_the_flag_there_are_no_such_routes(front: Any) -> None:
    for target in ("/sleep", "/v1/load_lora_adapter", "/abort_requests"):
        response = post(front, target)
        assert response.status_code == 404
        assert "--enable-operator-routes" in response.json()["error"]["message"]
    assert front.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_while_loading_they_are_closed() -> None:
    app = guarded_app(resolve_config({"enable_operator_routes": True}))
    assert call(app, "POST", "/reset_prefix_cache").status == 503
