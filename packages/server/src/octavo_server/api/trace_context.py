"""Remembers which trace a request belongs to, for the spans of its answers."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.tracing import trace_headers

_NAMES = ("traceparent", "tracestate")


class TraceContext:
    """ASGI middleware that keeps W3C's headers where `trace_headers` finds them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            found = {name: headers[name] for name in _NAMES if name in headers}
            trace_headers.set(found if "traceparent" in found else None)
        await self._app(scope, receive, send)
