"""Counts every HTTP request, and logs it if asked to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_server.metrics import Histogram

DURATION_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)

# Labels come from clients; only known ones may make a new time series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ROUTE = "none"
# nginx' word for a client that left before there was an answer.
_CLIENT_CLOSED_REQUEST = 499


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
        durations = self.durations.get((method, handler))
        if durations is None:
            durations = self.durations[method, handler] = Histogram(DURATION_BOUNDS)
        durations.observe(seconds)


@dataclass
class Access:
    """One line of the access log."""

    client: str
    method: str
    path: str
    http_version: str
    status: int
    seconds: float

    def __str__(self) -> str:
        return (
            f'{self.client} - "{self.method} {self.path} HTTP/{self.http_version}" '
            f"{self.status} {self.seconds:.3f} s"
        )


class RequestLog:
    """ASGI middleware around everything else, so that refused requests count, too.

    Args:
        counts: Where to count.
        log: Called with each request once it is answered; None logs nothing.
    """

    def __init__(
        self, app: ASGIApp, counts: HTTPCounts, log: Callable[[Access], None] | None
    ) -> None:
        self._app = app
        self._counts = counts
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and note how it went."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_CLOSED_REQUEST
        started = time.perf_counter()

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            seconds = time.perf_counter() - started
            self._counts.add(scope["method"], _handler(scope), status, seconds)
            if self._log is not None:
                self._log(_access(scope, status, seconds))


def _handler(scope: Scope) -> str:
    """Return the route's own path, which has names where a request has values."""
    route: Any = scope.get("route")
    return getattr(route, "path", _NO_ROUTE)


def _access(scope: Scope, status: int, seconds: float) -> Access:
    host, port = scope["client"] or ("?", 0)
    query = scope["query_string"]
    path = scope["raw_path"] + (b"?" + query if query else b"")
    return Access(
        f"{host}:{port}",
        scope["method"],
        path.decode("latin-1"),
        scope["http_version"],
        status,
        seconds,
    )
