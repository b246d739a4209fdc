"""HTTP requests that another front of this server has to answer, and its answers.

An answer of the Responses API stays in the front that made it. Which one that was stands in its
id, so whoever gets a request about it passes it on through the hub, and the answer comes back
the same way, part by part.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.api.errors import SERVICE_UNAVAILABLE, ApiError
from octavo_server.api.sse import until_disconnect
from octavo_server.front_wire import FrontLost, PeerLeft, PeerPart, PeerRequest, ToHub

logger = logging.getLogger(__name__)

# Parts that may wait for one client that does not read; a part is a step's events at most.
_MAX_WAITING_PARTS = 4096


class Sender(Protocol):
    """What the desk needs of a `octavo_server.hub_link.HubLink`."""

    index: int

    def send(self, message: ToHub) -> None:
        """Send a message to the hub."""
        ...


class PeerDesk:
    """Passes requests on to other fronts, and answers theirs.

    Args:
        link: The way to the hub.
        app: Answers what other fronts pass on. They have checked the key.
    """

    def __init__(self, link: Sender, app: ASGIApp) -> None:
        self._link = link
        self._app = app
        self._ids = itertools.count(1)
        # What we have passed on, and the tasks that answer others, by who asked and its id.
        self._asked: dict[int, tuple[int, asyncio.Queue[PeerPart | None]]] = {}
        self._serving: dict[tuple[int, int], asyncio.Task[None]] = {}

    async def forward(self, request: Request, home: int, body: bytes) -> Response:
        """Return the answer of front `home`, which comes as it is sent.

        Raises:
            ApiError: That front is just being started again.
        """
        call_id = next(self._ids)
        parts: asyncio.Queue[PeerPart | None] = asyncio.Queue()
        self._asked[call_id] = (home, parts)
        scope = request.scope
        self._link.send(
            PeerRequest(
                call_id,
                self._link.index,
                home,
                scope["method"],
                scope["path"],
                scope["query_string"],
                [(bytes(name), bytes(value)) for name, value in scope["headers"]],
                body,
            )
        )
        leave = PeerLeft(call_id, self._link.index, home)
        try:
            first = await until_disconnect(request.receive, parts.get())
        except BaseException:
            self._forget(leave)
            raise
        if first is None or not first.headers:
            self._forget(leave)
            raise ApiError(
                503,
                "the front process that has this response is being restarted, and its responses "
                "are lost",
                SERVICE_UNAVAILABLE,
                code="response_lost",
                retry_after=1,
            )
        return _PeerResponse(first, parts, lambda: self._forget(leave))

    def on_message(self, message: PeerRequest | PeerPart | PeerLeft | FrontLost) -> None:
        """Take what another front says."""
        match message:
            case PeerRequest():
                key = (message.source, message.call_id)
                task = self._serving[key] = asyncio.create_task(self._serve(message))
                task.add_done_callback(lambda _: self._serving.pop(key, None))
            case PeerLeft():
                serving = self._serving.get((message.source, message.call_id))
                if serving is not None:
                    serving.cancel()
            case PeerPart():
                self._take(message)
            case FrontLost(index):
                for home, parts in self._asked.values():
                    if home == index:
                        parts.put_nowait(None)
                # Its successor counts its calls from 1 again, and would take these for its own.
                for (source, _), serving in self._serving.items():
                    if source == index:
                        serving.cancel()

    def _take(self, part: PeerPart) -> None:
        home, parts = self._asked.get(part.call_id, (0, None))
        if parts is None:
            return
        if parts.qsize() < _MAX_WAITING_PARTS:
            parts.put_nowait(part)
        else:  # the client has stopped to read
            parts.put_nowait(None)
            self._forget(PeerLeft(part.call_id, self._link.index, home))

    def _forget(self, leave: PeerLeft) -> None:
        """Listen no more to an answer; it may be complete."""
        if self._asked.pop(leave.call_id, None) is not None:
            self._link.send(leave)

    async def _serve(self, asked: PeerRequest) -> None:
        """Answer a request that a client sent to another front."""
        has_body = True
        has_ended = False

        async def receive() -> dict[str, Any]:
            nonlocal has_body
            if has_body:
                has_body = False
                return {"type": "http.request", "body": asked.body, "more_body": False}
            await asyncio.Event().wait()  # its leaving cancels us
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal has_ended
            part: dict[str, Any] = {}
            if message["type"] == "http.response.start":
                part["status"], part["headers"] = message["status"], list(message["headers"])
            else:
                part["body"] = bytes(message.get("body", b""))
                has_ended = part["is_last"] = not message.get("more_body", False)
            self._link.send(PeerPart(asked.call_id, asked.source, **part))

        try:
            await self._app(_scope_of(asked), receive, send)
        except Exception:
            logger.exception("A request of another front failed")
        # Not where this was cancelled: whoever asked has gone.
        if not has_ended:
            self._link.send(PeerPart(asked.call_id, asked.source, is_last=True))


class _PeerResponse(Response):
    """Sends on what another front answers."""

    def __init__(self, first: PeerPart, parts: asyncio.Queue[PeerPart | None], close: Any) -> None:
        self._parts = parts
        self._close = close
        self.status_code = first.status
        self.background = None
        self.raw_headers = list(first.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            await until_disconnect(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        is_last = False
        while not is_last:
            part = await self._parts.get()
            is_last = part is None or part.is_last
            body = b"" if part is None else part.body
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _scope_of(asked: PeerRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "root_path": "",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "headers": list(asked.headers),
        "client": None,
        "server": None,
        "state": {},
    }
