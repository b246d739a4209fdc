"""The result of a simulation, as a struct, as JSON and as a table for a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from octavo_core.simulator.measurements import Measurements
from octavo_core.simulator.quantiles import QuantileSketch
from octavo_core.simulator.timeline import Interval
from octavo_core.wire import SchedulerStats


class Latency(msgspec.Struct, frozen=True):
    """Seconds: the mean, percentiles and the largest value."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of a simulation. Times are in seconds of the virtual clock.

    Attributes:
        num_requests: Arrivals.
        num_refused: Arrivals that the scheduler refused, for example as too long.
        refusals: The same by the name of the error.
        duration: From the start of the trace to the last token.
        ttft: From arrival to the first token.
        itl: Between two tokens of an answer, over all gaps.
        tpot: Mean gap of an answer, over all answers.
        e2e: From arrival to the last token.
        prefix_cache_hit_rate: Share of prompt tokens that were found in the prefix cache.
        kv_cache_usage_mean: Share of all blocks in use, over the whole duration.
        utilization: Share of the duration in which a replica computed, over all replicas.
        tokens_per_step: Mean tokens of a step; the budget is its limit.
        requests_per_step: Mean requests of a step.
        requests_per_replica_max: The most requests that one replica got.
        timeline: Load by intervals of time.
    """

    num_requests: int
    num_finished: int
    num_failed: int
    num_refused: int
    refusals: dict[str, int]
    duration: float
    input_tokens: int
    output_tokens: int
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    ttft: Latency
    itl: Latency
    tpot: Latency
    e2e: Latency
    kv_cache_usage_mean: float
    kv_cache_usage_peak: float
    num_preemptions: int
    prefix_cache_hit_rate: float
    num_steps: int
    tokens_per_step: float
    requests_per_step: float
    utilization: float
    num_replicas: int
    requests_per_replica_min: int
    requests_per_replica_max: int
    timeline: list[Interval] = []


def make_report(
    measurements: Measurements, stats: Sequence[SchedulerStats], requests_per_replica: Sequence[int]
) -> Report:
    """Turn sums into a report.

    Args:
        stats: Of each replica's scheduler, at the end.
        requests_per_replica: How many requests each got.
    """
    duration = measurements.end
    seconds = duration or 1.0
    steps = measurements.num_steps or 1
    queries = sum(stat.prefix_cache_queries for stat in stats)
    hits = sum(stat.prefix_cache_hits for stat in stats)
    return Report(
        num_requests=measurements.num_requests,
        num_finished=measurements.num_finished,
        num_failed=measurements.num_failed,
        num_refused=sum(measurements.refusals.values()),
        refusals=dict(measurements.refusals),
        duration=duration,
        input_tokens=measurements.num_input_tokens,
        output_tokens=measurements.num_output_tokens,
        requests_per_second=measurements.num_finished / seconds,
        input_tokens_per_second=measurements.num_input_tokens / seconds,
        output_tokens_per_second=measurements.num_output_tokens / seconds,
        ttft=_latency(measurements.time_to_first_token),
        itl=_latency(measurements.inter_token_latency),
        tpot=_latency(measurements.time_per_output_token),
        e2e=_latency(measurements.end_to_end),
        kv_cache_usage_mean=measurements.usage_seconds / seconds / len(stats),
        kv_cache_usage_peak=measurements.peak_usage,
        num_preemptions=sum(stat.num_preemptions for stat in stats),
        prefix_cache_hit_rate=hits / queries if queries else 0.0,
        num_steps=measurements.num_steps,
        tokens_per_step=measurements.num_computed_tokens / steps,
        requests_per_step=measurements.num_rows / steps,
        utilization=measurements.busy_seconds / seconds / len(stats),
        num_replicas=len(stats),
        requests_per_replica_min=min(requests_per_replica),
        requests_per_replica_max=max(requests_per_replica),
        timeline=measurements.timeline.intervals(),
    )


def _latency(sketch: QuantileSketch) -> Latency:
    p50, p90, p99 = (sketch.quantile(share) for share in (0.5, 0.9, 0.99))
    return Latency(sketch.mean, p50, p90, p99, sketch.max)


_LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}


def format_report(report: Report) -> str:
    """Write a report for a person."""
    refused = f", {report.num_refused} refused" if report.num_refused else ""
    failed = f", {report.num_failed} failed" if report.num_failed else ""
    replicas = "1 replica"
    if report.num_replicas > 1:
        replicas = (
            f"{report.num_replicas} replicas ({report.requests_per_replica_min:,} to "
            f"{report.requests_per_replica_max:,} requests each)"
        )
    lines = [
        f"{report.num_finished:,} of {report.num_requests:,} requests{refused}{failed} in "
        f"{format_seconds(report.duration)} on {replicas}",
        "",
        f"  {'':<22}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    for name, title in _LATENCIES.items():
        latency: Latency = getattr(report, name)
        values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
        lines.append(f"  {title:<22}" + "".join(f"{format_seconds(v):>10}" for v in values))
    lines += [
        "",
        f"  throughput            {report.requests_per_second:,.2f} requests/s, "
        f"{report.input_tokens_per_second:,.0f} input and "
        f"{report.output_tokens_per_second:,.0f} output tokens/s",
        f"  KV cache              {report.kv_cache_usage_mean:.1%} mean, "
        f"{report.kv_cache_usage_peak:.1%} peak, {report.num_preemptions:,} preemptions",
        f"  prefix cache          {report.prefix_cache_hit_rate:.1%} of prompt tokens hit",
        f"  steps                 {report.num_steps:,}, of {report.requests_per_step:.1f} requests "
        f"and {report.tokens_per_step:.1f} tokens; devices {report.utilization:.1%} busy",
    ]
    if report.refusals:
        reasons = ", ".join(f"{count:,} {name}" for name, count in sorted(report.refusals.items()))
        lines.append(f"  refused               {reasons}")
    return "\n".join(lines)


_COMPARED: dict[str, Callable[[Report], str]] = {
    "requests/s": lambda report: f"{report.requests_per_second:.2f}",
    "output tok/s": lambda report: f"{report.output_tokens_per_second:,.0f}",
    "TTFT mean": lambda report: format_seconds(report.ttft.mean),
    "TTFT p99": lambda report: format_seconds(report.ttft.p99),
    "ITL mean": lambda report: format_seconds(report.itl.mean),
    "ITL p99": lambda report: format_seconds(report.itl.p99),
    "e2e p99": lambda report: format_seconds(report.e2e.p99),
    "KV peak": lambda report: f"{report.kv_cache_usage_peak:.0%}",
    "preempted": lambda report: f"{report.num_preemptions:,}",
    "prefix hits": lambda report: f"{report.prefix_cache_hit_rate:.1%}",
}


def format_comparison(
    fields: Sequence[str], reports: Sequence[tuple[Sequence[str], Report]]
) -> str:
    """Write one line for each setting.

    Args:
        fields: Names of the settings that vary.
        reports: Pairs of their values, as they were written, and the report.
    """
    rows = [[*fields, *_COMPARED]]
    for values, report in reports:
        rows.append([*values, *(show(report) for show in _COMPARED.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def format_seconds(seconds: float) -> str:
    """Write a time for a person, for example ``12.3 ms``."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for limit, factor, unit in ((1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "µs")):
        if seconds >= limit:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{seconds} s"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
