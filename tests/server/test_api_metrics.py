"""``/metrics`` and ``/load``: the names that dashboards know, and numbers that add up."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from octavo_core.config import resolve_config
from octavo_core.wire import SchedulerStats
from octavo_server.api.fronts import ServerTotals
from support.asgi import loading_context

LABELS = {"model_name": "bytes", "engine": "0"}

# vLLM's names, less those of features that Octavo does not have.
GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "engine_sleep_state",
    "cache_config_info",
]
COUNTERS = [
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_num_preemptions",
    "iteration_tokens_total",
]
LATENCIES = HISTOGRAMS[3:8]


@pytest.fixture(scope="module")
def front(start_shared_front: Any) -> Any:
    """One that nobody else has asked for anything."""
    return start_shared_front(max_num_queued_reqs=64).wait_ready()


class Metrics:
    """One scrape."""

    def __init__(self, front: Any) -> None:
        response = httpx.get(front.url + "/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        self.text = response.text
        self.samples = {}
        for line in self.text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                self.samples[name] = float(value)

    def value(self, name: str, **labels: str) -> float:
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        found = [
            value
            for sample, value in self.samples.items()
            if sample.partition("{")[0] == name
            and wanted <= set(re.findall(r'\w+="[^"]*"', sample))
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def ended(self, reason: str) -> float:
        return self.value("vllm:request_success_total", finished_reason=reason)


def change(before: Metrics, after: Metrics, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)


def wait_for_idle(front: Any) -> Metrics:
    deadline = time.monotonic() + 10
    while True:
        metrics = Metrics(front)
        if not metrics.value("vllm:num_requests_running"):
            return metrics
        assert time.monotonic() < deadline, metrics.text
        time.sleep(0.05)


def test_the_names_are_those_that_dashboards_ask_for(front: Any) -> None:
    front.post("/v1/completions", {"prompt": "abc", "max_tokens": 2})
    metrics = Metrics(front)
    for name in GAUGES:
        assert f"# TYPE vllm:{name} gauge" in metrics.text
    for name in COUNTERS:
        assert f"# TYPE vllm:{name}_total counter" in metrics.text
    for name in HISTOGRAMS:
        assert f"# TYPE vllm:{name} histogram" in metrics.text
        count = metrics.value(f"vllm:{name}_count", **LABELS)
        assert metrics.value(f"vllm:{name}_bucket", le="+Inf", **LABELS) == count
    assert metrics.value("vllm:engine_sleep_state", sleep_state="awake") == 1
    assert metrics.value("vllm:cache_config_info", block_size="16") == 1
    assert metrics.value("process_resident_memory_bytes") > 1e6
    # Buckets of tokens end at the longest request.
    bounds = [
        float(b) for b in re.findall(r'request_prompt_tokens_bucket.*le="([\d.]+)"', metrics.text)
    ]
    assert bounds[-1] == 500


def test_tokens_and_ends_are_counted(front: Any) -> None:
    before = Metrics(front)
    assert front.post("/v1/completions", {"prompt": "abcde", "max_tokens": 3}).status_code == 200
    front.post("/v1/completions", {"prompt": "xyz", "max_tokens": 9})  # ends by itself, with EOS
    front.post("/v1/completions", {"prompt": "to break", "max_tokens": 9})
    after = Metrics(front)
    assert change(before, after, "vllm:prompt_tokens_total") == 8
    assert change(before, after, "vllm:generation_tokens_total") == 3 + 4
    for reason, count in {"length": 1, "stop": 1, "error": 1, "abort": 0}.items():
        assert after.ended(reason) - before.ended(reason) == count, reason
    for name in LATENCIES:
        assert change(before, after, f"vllm:{name}_count") == 2, name
    assert change(before, after, "vllm:time_to_first_token_seconds_count") == 2
    assert change(before, after, "vllm:inter_token_latency_seconds_count") == 2 + 3
    assert change(before, after, "vllm:request_generation_tokens_sum") == 7
    assert change(before, after, "vllm:iteration_tokens_total_sum") == 8 + 7
    whole = change(before, after, "vllm:e2e_request_latency_seconds_sum")
    parts = [
        change(before, after, f"vllm:request_{part}_time_seconds_sum")
        for part in ("queue", "prefill", "decode")
    ]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(whole, abs=0.05)


def test_m03_gauges_return_to_zero_when_all_clients_have_left(front: Any) -> None:
    """M03: nobody sends a further request, and still nothing stays at its last value."""
    host, port = front.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "slow" * 100, "max_tokens": 400, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    before = Metrics(front)
    sockets = [socket.create_connection((host, int(port))) for _ in range(32)]
    for sock in sockets:
        sock.sendall(head.encode() + body)
    for sock in sockets:
        assert sock.recv(1)
    busy = Metrics(front)
    assert busy.value("vllm:num_requests_running") == 32
    assert busy.value("vllm:kv_cache_usage_perc") > 0
    assert httpx.get(front.url + "/load").json() == {"server_load": 32}
    for sock in sockets:
        sock.close()
    idle = wait_for_idle(front)
    assert idle.value("vllm:num_requests_waiting") == 0
    assert idle.value("vllm:kv_cache_usage_perc") == 0
    assert idle.ended("abort") - before.ended("abort") == 32
    assert httpx.get(front.url + "/load").json() == {"server_load": 0}


def test_m05_a_stream_that_ended_is_no_abort(front: Any) -> None:
    """M05: read to the end, with two choices, and cut at a stop string."""
    before = wait_for_idle(front)
    bodies: list[tuple[dict[str, Any], int]] = [
        *[({"prompt": f"text {number}", "max_tokens": 4}, 1) for number in range(10)],
        ({"prompt": "twice", "max_tokens": 4, "n": 2}, 2),
        ({"prompt": "one. two. three", "max_tokens": 12, "stop": ". t"}, 1),
    ]
    threads = [
        threading.Thread(target=front.events, args=("/v1/completions", body)) for body, _ in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = wait_for_idle(front)
    assert after.ended("abort") == before.ended("abort")
    assert after.ended("stop") - before.ended("stop") == 1
    assert after.ended("length") - before.ended("length") == 12
    for name in LATENCIES:
        assert change(before, after, f"vllm:{name}_count") == 13, name
    assert change(before, after, "vllm:request_params_n_count") == len(bodies)
    assert change(before, after, "vllm:request_max_num_generation_tokens_count") == len(bodies)


def test_requests_are_counted_by_route(front: Any) -> None:
    before = Metrics(front)
    for path in ("/v1/models/bytes", "/v1/models/other", "/nope/1", "/nope/2"):
        httpx.get(front.url + path)
    httpx.request("BREW", front.url + "/version")
    after = Metrics(front)
    model = {"method": "GET", "handler": "/v1/models/{model_id:path}"}
    assert after.value("http_requests_total", status="2xx", **model) == 1
    assert after.value("http_requests_total", status="4xx", **model) == 1
    assert after.value("http_requests_total", status="4xx", handler="none", method="GET") == 2
    assert after.value("http_requests_total", status="4xx", method="OTHER") == 1
    assert change(before, after, "http_requests_total", handler="/metrics") == 1
    assert after.value("http_request_duration_seconds_count", **model) == 2


def test_each_metric_is_in_the_documentation(front: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    names = re.findall(r"# TYPE (?:vllm:)?(\w+)", Metrics(front).text)
    assert len(names) > 30
    for name in names:
        assert f"`{name}`" in page or name.startswith("process_"), name


def test_another_prefix() -> None:
    context = loading_context(resolve_config({"metrics_prefix": "octavo_"}))
    model: Any = SimpleNamespace(name="m", max_model_len=512)
    context.model = model
    stats = SchedulerStats(num_running=3, kv_cache_usage=0.5)
    totals = ServerTotals(context.client.metrics, context.http, stats)
    text = context.exporter().render(totals).decode()
    assert 'octavo_num_requests_running{engine="0",model_name="m"} 3.0' in text
    assert "vllm:" not in text
