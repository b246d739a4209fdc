"""One span for each answer, as a part of the caller's trace."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo_core.errors import ConfigError
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_server.metrics import ServingMetrics
from octavo_server.request_output import OutputDelta
from octavo_server.tracing import RequestTracer, make_tracer, trace_headers

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def metrics(exporter: InMemorySpanExporter) -> ServingMetrics:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics = ServingMetrics()
    metrics.tracer = RequestTracer(provider)
    return metrics


def answer(metrics: ServingMetrics, reason: str = "length") -> None:
    params = SamplingParams(max_tokens=5, temperature=0.5)
    request = EngineCoreRequest("req-1", [1] * 10, params, 100.0)
    (progress,) = metrics.start([request], now=100.0)
    first = OutputDelta(
        request_id="r", index=0, text="", token_ids=[1], scheduled_time=101.0, num_cached_tokens=4
    )
    metrics.add(progress, first, 103.0)
    last = OutputDelta(request_id="r", index=0, text="", token_ids=[1], finish_reason=reason)
    metrics.add(progress, last, 106.0)


def test_a_span_tells_what_the_metrics_tell(
    metrics: ServingMetrics, exporter: InMemorySpanExporter
) -> None:
    answer(metrics)
    (span,) = exporter.get_finished_spans()
    assert span.name == "llm_request"
    assert (span.start_time, span.end_time) == (100 * 10**9, 106 * 10**9)
    assert span.parent is None
    assert span.attributes is not None
    wanted = {
        "gen_ai.request.id": "req-1",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reason": "length",
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.cached_tokens": 4,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 3.0,
        "gen_ai.latency.time_in_model_inference": 5.0,
        "gen_ai.latency.e2e": 6.0,
    }
    assert wanted.items() <= dict(span.attributes).items()


def test_it_belongs_to_the_trace_of_its_request(
    metrics: ServingMetrics, exporter: InMemorySpanExporter
) -> None:
    token = trace_headers.set({"traceparent": PARENT})
    try:
        answer(metrics, "error")
    finally:
        trace_headers.reset(token)
    answer(metrics)
    with_parent, without = exporter.get_finished_spans()
    assert with_parent.parent is not None
    assert f"{with_parent.context.trace_id:032x}" == TRACE_ID
    assert not with_parent.status.is_ok
    assert without.parent is None


def test_rubbish_in_the_header_is_no_parent(
    metrics: ServingMetrics, exporter: InMemorySpanExporter
) -> None:
    token = trace_headers.set({"traceparent": "x" * 5000})
    try:
        answer(metrics)
    finally:
        trace_headers.reset(token)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_without_opentelemetry_the_flag_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        make_tracer("http://127.0.0.1:1/v1/traces")


def test_spans_reach_a_collector(start_front: Any) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.02,))
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
        front = start_front(otlp_traces_endpoint=endpoint).wait_ready()
        headers = {"traceparent": PARENT}
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(
            front.url + "/v1/completions", json=body, headers=headers, timeout=20
        ).is_success
        assert front.stop() == 0  # sends what it still has
        collector.shutdown()
        thread.join()
    assert [path for path, _ in received] == ["/v1/traces"]
    assert b"llm_request" in received[0][1]
    assert bytes.fromhex(TRACE_ID) in received[0][1] or TRACE_ID.encode() in received[0][1]


@pytest.mark.parametrize("endpoint", ["localhost:4317", "x", "grpc://localhost:4317"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be an address such as http://"):
        make_tracer(endpoint)
