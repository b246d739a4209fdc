"""Refuses headers of too many lines; their size is bounded before they come here."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.api.errors import ApiError

_HEADERS_TOO_LARGE = 431


class HeaderLimit:
    """ASGI middleware that answers 431.

    Args:
        limit: Most lines of a header.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and len(scope["headers"]) > self._limit:
            refusal = ApiError(
                _HEADERS_TOO_LARGE,
                f"the header has {len(scope['headers'])} lines; the limit is {self._limit} "
                f"(--max-request-headers)",
            )
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)
