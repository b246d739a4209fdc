"""Gives a client's ``X-Request-Id`` back, so that it finds its request in two logs."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Visible ASCII, which can forge neither a header nor a line of a log.
_USABLE = re.compile(r"[!-~]{1,128}")


def usable_request_id(headers: Headers) -> str | None:
    """Return the id that a request came with, or None if it has none that can be given back."""
    request_id = headers.get("x-request-id")
    return request_id if request_id is not None and _USABLE.fullmatch(request_id) else None


def note_request_id(request: Request, body: object) -> None:
    """Remember the ``request_id`` of a body that has one, for `client_request_id`."""
    request.state.request_id = getattr(body, "request_id", None)


def client_request_id(request: Request) -> str | None:
    """Return what the client calls its request, in a header or else in the body."""
    in_body: str | None = getattr(request.state, "request_id", None)
    return usable_request_id(request.headers) or in_body


class RequestIdEcho:
    """ASGI middleware: an answer has the id that the request came with, errors included.

    Without one, or with one that is longer than 128 characters or has others than visible
    ASCII, the answer has the id that the server gave it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and write its id into the head of the response."""
        is_http = scope["type"] == "http"
        request_id = usable_request_id(Headers(scope=scope)) if is_http else None
        if request_id is None:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
