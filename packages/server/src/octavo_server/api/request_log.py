"""Counts every HTTP request, and logs it if asked to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_server.http_counts import HTTPCounts

_NO_ROUTE = "none"
# nginx' word for a client that left before there was an answer.
_CLIENT_CLOSED_REQUEST = 499


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
