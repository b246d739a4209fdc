"""The server's numbers in Prometheus' format, under vLLM's names.

Imported when ``/metrics`` is first asked for: prometheus-client takes 40 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo_core.wire import SchedulerStats
from octavo_server.http_counts import HTTPCounts
from octavo_server.metrics import Histogram, ServingMetrics

if TYPE_CHECKING:
    from octavo_server.api.context import LoadedModel, ServerContext
    from octavo_server.api.fronts import ServerTotals

CONTENT_TYPE = CONTENT_TYPE_LATEST

_ENGINE = "0"


class MetricsExporter:
    """Writes the metrics of one server. A thread may do that while the event loop counts.

    Args:
        context: The server.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._process = ProcessCollector(registry=None)

    def render(self, totals: ServerTotals) -> bytes:
        """Return the metrics as they are now."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_ServerCollector(self._context, totals))
        if not totals.is_shared:  # one of several processes says nothing about the server
            registry.register(self._process)
        return generate_latest(registry)


class _Page:
    """Families of metrics in the making.

    Args:
        prefix: What each name starts with.
        labels: What each sample carries.
    """

    def __init__(self, prefix: str, labels: dict[str, str]) -> None:
        self._prefix = prefix
        self._labels = labels
        self.families: dict[str, Any] = {}

    def gauge(self, name: str, text: str, value: float, **extra: str) -> None:
        """Add a number that goes up and down."""
        self._add(GaugeMetricFamily, name, text, extra, value)

    def counter(self, name: str, text: str, value: float, **extra: str) -> None:
        """Add a total; the format gives its name the ending ``_total``."""
        self._add(CounterMetricFamily, name, text, extra, value)

    def histogram(
        self, name: str, text: str, values: Histogram, limit: float | None = None, **extra: str
    ) -> None:
        """Add the buckets up to `limit`."""
        buckets = [(str(float(bound)), count) for bound, count in values.cumulative(limit)]
        buckets.append(("+Inf", values.count))
        self._add(HistogramMetricFamily, name, text, extra, buckets, values.sum)

    def _add(self, kind: Any, name: str, text: str, extra: dict[str, str], *values: Any) -> None:
        labels = self._labels | extra
        family = self.families.get(name)
        if family is None:
            family = kind(self._prefix + name, text, labels=list(labels))
            self.families[name] = family
        family.add_metric(list(labels.values()), *values)


class _ServerCollector(Collector):
    def __init__(self, context: ServerContext, totals: ServerTotals) -> None:
        self._context = context
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        page = _Page("", {})
        _add_http(page, self._totals.http)
        yield from page.families.values()
        if self._context.model is not None:
            yield from _serving_families(self._context, self._context.model, self._totals)


def _serving_families(
    context: ServerContext, model: LoadedModel, totals: ServerTotals
) -> Iterator[Metric]:
    prefix = context.config.observability.metrics_prefix
    page = _Page(prefix, {"model_name": model.name, "engine": _ENGINE})
    _add_load(page, context, totals.stats)
    _add_totals(page, totals.metrics)
    _add_times(page, totals.metrics)
    _add_sizes(page, totals.metrics, model.max_model_len)
    yield from page.families.values()
    settings = _Page(prefix, {"engine": _ENGINE})
    _add_settings(settings, context)
    yield from settings.families.values()


def _add_load(page: _Page, context: ServerContext, stats: SchedulerStats) -> None:
    client = context.client
    waiting = "num_requests_waiting"
    page.gauge("num_requests_running", "Requests that run.", stats.num_running)
    page.gauge(waiting, "Requests in line.", stats.num_waiting)
    for reason, value in (("capacity", stats.num_waiting), ("deferred", 0)):
        page.gauge(f"{waiting}_by_reason", "Requests in line, by reason.", value, reason=reason)
    page.gauge("num_waiting_tokens", "Tokens of requests in line.", stats.num_waiting_tokens)
    page.gauge("kv_cache_usage_perc", "KV cache in use, 0 to 1.", stats.kv_cache_usage)
    page.gauge("host_kv_cache_usage_perc", "--swap-space in use, 0 to 1.", stats.host_cache_usage)
    for state, is_on in (
        ("awake", not context.sleeping),
        ("weights_offloaded", context.sleep_level == 1),
        ("discard_all", context.sleep_level == 2),
    ):
        page.gauge("engine_sleep_state", "1 for each true state.", int(is_on), sleep_state=state)
    queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
    page.counter("engine_restarts", "Engines that have crashed.", client.num_restarts)
    page.counter("num_preemptions", "Requests put back in line.", stats.num_preemptions)
    page.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", queries)
    page.counter("prefix_cache_hits", "Tokens found in the prefix cache.", hits)
    page.counter(
        "external_prefix_cache_hits", "Of these, tokens out of host memory.", stats.host_cache_hits
    )


def _add_totals(page: _Page, metrics: ServingMetrics) -> None:
    page.counter("prompt_tokens", "Tokens of prompts.", metrics.num_prompt_tokens)
    page.counter(
        "prompt_tokens_cached", "Tokens of prompts found in a cache.", metrics.num_cached_tokens
    )
    page.counter("generation_tokens", "Tokens of answers.", metrics.num_generation_tokens)
    for reason, count in list(metrics.finished.items()):
        page.counter("request_success", "Answers that have ended.", count, finished_reason=reason)
    for reason, count in list(metrics.rejections.items()):
        page.counter("admission_rejections", "Requests turned away.", count, reason=reason)


def _add_times(page: _Page, metrics: ServingMetrics) -> None:
    for name, values, text in (
        ("time_to_first_token", metrics.time_to_first_token, "From arrival to the first token."),
        ("inter_token_latency", metrics.inter_token_latency, "From one output to the next."),
        (
            "request_time_per_output_token",
            metrics.time_per_output_token,
            "Mean time between two tokens of an answer.",
        ),
        ("e2e_request_latency", metrics.e2e_latency, "From arrival to the end."),
        ("request_queue_time", metrics.queue_time, "From arrival to the first step."),
        ("request_prefill_time", metrics.prefill_time, "From the first step to the first token."),
        ("request_decode_time", metrics.decode_time, "From the first token to the last."),
        ("request_inference_time", metrics.inference_time, "From the first step to the end."),
    ):
        page.histogram(f"{name}_seconds", text, values)


def _add_sizes(page: _Page, metrics: ServingMetrics, max_model_len: int) -> None:
    for name, values, text in (
        ("request_prompt_tokens", metrics.prompt_tokens, "Tokens of a prompt."),
        ("request_generation_tokens", metrics.generation_tokens, "Tokens of an answer."),
        (
            "request_max_num_generation_tokens",
            metrics.max_generation_tokens,
            "Tokens of a request's longest answer.",
        ),
        ("request_params_max_tokens", metrics.params_max_tokens, "The request's max_tokens."),
        (
            "request_prefill_kv_computed_tokens",
            metrics.prefill_computed_tokens,
            "Tokens of a prompt that no cache had.",
        ),
    ):
        page.histogram(name, text, values, max_model_len)
    page.histogram("request_params_n", "The request's choices.", metrics.params_n)
    page.histogram("request_num_preemptions", "Preemptions of an answer.", metrics.preemptions)
    page.histogram("iteration_tokens_total", "Tokens of a step.", metrics.step_tokens)


def _add_settings(page: _Page, context: ServerContext) -> None:
    cache = context.config.cache
    told = {name: str(getattr(cache, name)) for name in cache.__struct_fields__}
    if context.client.limits is not None:
        told["num_gpu_blocks"] = str(context.client.limits.num_blocks)
        told["block_size"] = str(context.client.limits.block_size)
    page.gauge("cache_config_info", "The KV cache's settings.", 1, **told)


def _add_http(page: _Page, http: HTTPCounts) -> None:
    for (method, handler, status), count in list(http.requests.items()):
        page.counter(
            "http_requests",
            "HTTP requests.",
            count,
            method=method,
            handler=handler,
            status=f"{status // 100}xx",
        )
    for (method, handler), values in list(http.durations.items()):
        page.histogram(
            "http_request_duration_seconds",
            "From a request's header to the end of its answer.",
            values,
            method=method,
            handler=handler,
        )
