"""What a front has counted, as one message, and the sum of several."""

from __future__ import annotations

from collections import Counter

import msgspec

from octavo_server.http_counts import HTTPCounts
from octavo_server.metrics import Histogram, ServingMetrics


class HistogramReport(msgspec.Struct, frozen=True, array_like=True):
    """A `Histogram`, of which both ends know the bounds."""

    counts: list[int]
    sum: float


class MetricsReport(msgspec.Struct, frozen=True, array_like=True):
    """All that `ServingMetrics` and `HTTPCounts` hold.

    Attributes:
        numbers: Totals, by the name of the attribute.
        tables: Totals by reason, likewise.
        histograms: Likewise.
        requests: HTTP requests by method, route and class of status.
        durations: Of these, by method and route.
    """

    numbers: dict[str, int] = {}
    tables: dict[str, dict[str, int]] = {}
    histograms: dict[str, HistogramReport] = {}
    requests: list[tuple[str, str, int, int]] = []
    durations: list[tuple[str, str, HistogramReport]] = []


def report_of(metrics: ServingMetrics, http: HTTPCounts) -> MetricsReport:
    """Return what was counted so far."""
    values = {name: value for name, value in vars(metrics).items() if not name.startswith("_")}
    return MetricsReport(
        numbers={name: value for name, value in values.items() if type(value) is int},
        tables={name: dict(value) for name, value in values.items() if isinstance(value, dict)},
        histograms={
            name: _of(value) for name, value in values.items() if isinstance(value, Histogram)
        },
        requests=[(*key, count) for key, count in http.requests.items()],
        durations=[(*key, _of(histogram)) for key, histogram in http.durations.items()],
    )


def add_report(metrics: ServingMetrics, http: HTTPCounts, report: MetricsReport) -> None:
    """Add what another front has counted."""
    for name, number in report.numbers.items():
        setattr(metrics, name, getattr(metrics, name) + number)
    for name, table in report.tables.items():
        total = getattr(metrics, name)
        for reason, number in table.items():
            total[reason] = total.get(reason, 0) + number
    for name, histogram in report.histograms.items():
        _add(getattr(metrics, name), histogram)
    http.requests += Counter(
        {(method, handler, status): count for method, handler, status, count in report.requests}
    )
    for method, handler, histogram in report.durations:
        _add(http.histogram(method, handler), histogram)


def sum_reports(reports: list[MetricsReport]) -> MetricsReport:
    """Return what several fronts have counted together."""
    metrics, http = ServingMetrics(), HTTPCounts()
    for report in reports:
        add_report(metrics, http, report)
    return report_of(metrics, http)


def _of(histogram: Histogram) -> HistogramReport:
    return HistogramReport(list(histogram.counts), histogram.sum)


def _add(histogram: Histogram, report: HistogramReport) -> None:
    histogram.counts = [a + b for a, b in zip(histogram.counts, report.counts, strict=True)]
    histogram.sum += report.sum
