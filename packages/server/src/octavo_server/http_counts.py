"""HTTP requests by route, in plain numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from octavo_server.metrics import Histogram

DURATION_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)

# Labels come from clients; only known ones may make a new time series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass
class HTTPCounts:
    """Requests so far.

    Attributes:
        requests: By method, route and class of status (200, 400 …).
        durations: Seconds, by method and route.
    """

    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    durations: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def add(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count one request."""
        method = method if method in _METHODS else "OTHER"
        self.requests[method, handler, status // 100 * 100] += 1
        self.histogram(method, handler).observe(seconds)

    def histogram(self, method: str, handler: str) -> Histogram:
        """Return the durations of one route."""
        durations = self.durations.get((method, handler))
        if durations is None:
            durations = self.durations[method, handler] = Histogram(DURATION_BOUNDS)
        return durations
