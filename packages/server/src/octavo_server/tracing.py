"""OpenTelemetry spans, one for each answer; only with ``--otlp-traces-endpoint``.

OpenTelemetry's packages are the user's to install, in the versions that the rest of their
system has; nothing here imports them unless the flag is given.
"""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from octavo_core.errors import ConfigError

if TYPE_CHECKING:
    from octavo_server.metrics import ChoiceProgress

# W3C's headers of the request that is being handled: whose span ours is a part of.
trace_headers: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)

_PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_NANOSECONDS = 1_000_000_000


class RequestTracer:
    """Makes a span when an answer has ended; a thread of OpenTelemetry's own sends it.

    Args:
        provider: OpenTelemetry's ``TracerProvider``.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("octavo")
        self._trace = importlib.import_module("opentelemetry.trace")
        context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator = context.TraceContextTextMapPropagator()

    def current_headers(self) -> dict[str, str] | None:
        """Return whose trace the request that is being handled belongs to."""
        return trace_headers.get()

    def end(self, progress: ChoiceProgress, reason: str, now: float) -> None:
        """Tell how an answer came to be.

        Args:
            progress: Its times.
            reason: ``stop``, ``length``, ``abort`` or ``error``.
            now: Seconds since the epoch.
        """
        parent = None
        if progress.trace_headers is not None:
            parent = self._propagator.extract(progress.trace_headers)
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            start_time=_nanoseconds(progress.arrival_time),
            attributes=_attributes(progress, reason, now),
        )
        if reason == "error":
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(_nanoseconds(max(now, progress.arrival_time)))

    def shutdown(self) -> None:
        """Send what is left, and stop the thread."""
        self._provider.shutdown()


def make_tracer(endpoint: str) -> RequestTracer:
    """Return a tracer that sends spans over HTTP.

    Args:
        endpoint: For example ``http://localhost:4318/v1/traces``.

    Raises:
        ConfigError: That is no address, or OpenTelemetry is not installed.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}; it must be an address such as "
            f"http://localhost:4318/v1/traces.",
            field="otlp_traces_endpoint",
        )
    try:
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install {_PACKAGES}.",
            field="otlp_traces_endpoint",
        ) from None
    # The variables of OpenTelemetry (OTEL_SERVICE_NAME and others) count more than this name.
    resource = resources.Resource({"service.name": "octavo"}).merge(resources.Resource.create())
    provider = sdk.TracerProvider(resource=resource)
    exporter = otlp.OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    return RequestTracer(provider)


def _attributes(progress: ChoiceProgress, reason: str, now: float) -> dict[str, Any]:
    """Return the span's attributes, by the names that vLLM gives them."""
    params = progress.sampling_params
    attributes: dict[str, Any] = {
        "gen_ai.request.id": progress.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.response.finish_reason": reason,
        "gen_ai.usage.prompt_tokens": progress.num_prompt_tokens,
        "gen_ai.usage.cached_tokens": progress.num_cached_tokens,
        "gen_ai.usage.completion_tokens": progress.num_output_tokens,
        "gen_ai.latency.e2e": max(0.0, now - progress.arrival_time),
        "octavo.num_preemptions": progress.num_preemptions,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if progress.first_token_time:
        scheduled = progress.scheduled_time or progress.arrival_time
        first, last = progress.first_token_time, progress.last_token_time
        for name, start, end in (
            ("time_in_queue", progress.arrival_time, scheduled),
            ("time_to_first_token", progress.arrival_time, first),
            ("time_in_model_prefill", scheduled, first),
            ("time_in_model_decode", first, last),
            ("time_in_model_inference", scheduled, last),
        ):
            attributes[f"gen_ai.latency.{name}"] = max(0.0, end - start)
    return attributes


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
