"""Server-sent events, and what happens when the reader leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# Clients skip comments; proxies see that the connection is alive.
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()
encode = _encoder.encode

Result = TypeVar("Result")


def event(content: Any) -> bytes:
    """Encode one event."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """Encode one event that has a name."""
    return b"event: " + name.encode() + b"\n" + event(content)


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await `work`, and cancel it if the client leaves first.

    The request's body must have been read: what `receive` gives next is the end.

    Raises:
        ClientDisconnect: The client left; `work` was cancelled and has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        # Both must have ended before the request's resources go away.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response that sends events as they come and stops when the client leaves.

    Args:
        events: Yields encoded events.
        close: Called in every case once nothing is sent any more, even if `events` was never
            started: it aborts what the events come from.
        headers: Further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        self._events = events
        self._close = close
        self._is_idle = False
        self._num_sent = 0
        self.status_code = 200
        self.background = None
        # Proxies must pass events on at once.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        # `init_headers` sets the length of a body, and there is none yet.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        interval = scope["app"].state.context.config.server.sse_keep_alive_interval
        try:
            await until_disconnect(receive, self._send_all(send, interval))
        except ClientDisconnect:
            logger.debug("A client left its stream")
        finally:
            self._close()
            await self._events.aclose()

    async def _send_all(self, send: Send, interval: float) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        keeper = asyncio.create_task(self._keep_alive(send, interval)) if interval else None
        try:
            self._is_idle = True
            async for data in self._events:
                self._is_idle = False
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._num_sent += 1
                self._is_idle = True
        finally:
            if keeper is not None:
                keeper.cancel()
                await asyncio.wait({keeper})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send, interval: float) -> None:
        """Send a comment whenever nothing was sent for `interval` seconds.

        A task beside the stream, since a time-out around each event would cost 20 us a token.
        """
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(interval)
            if self._is_idle and num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
