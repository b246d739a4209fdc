"""Gives a client's ``X-Request-Id`` back, so that it finds its request in two logs."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Visible ASCII, which can forge neither a header nor a line of a log.
_USABLE = re.compile(r"[!-~]{1,128}")


class RequestIdEcho:
    """ASGI middleware: an answer has the id that the request came with, errors included.

    Without one, or with one that is longer than 128 characters or has others than visible
    ASCII, the answer has the id that the server gave it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and write its id into the head of the response."""
        request_id = Headers(scope=scope).get("x-request-id") if scope["type"] == "http" else None
        if request_id is None or not _USABLE.fullmatch(request_id):
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
