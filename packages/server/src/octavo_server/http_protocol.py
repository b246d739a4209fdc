"""HTTP/1.1 as uvicorn speaks it, with an end to every wait for a client.

uvicorn bounds the size of a header, and how long a connection may be idle between two requests.
It waits for ever for the rest of a header or a body once the first byte is there, so a few
thousand clients that send a byte a minute hold all of a server's connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections import OrderedDict
from typing import Any

import msgspec
from uvicorn.protocols.http import h11_impl

from octavo_core.config import LimitsConfig

# The states and events of the very connection that uvicorn makes; we have no need of h11 but that.
h11: Any = vars(h11_impl)["h11"]

logger = logging.getLogger(__name__)

# Files that a front opens beside its connections: 19, and some for another engine or a helper.
_OTHER_FILES = 100
_HEADERS_TOO_LARGE = 431
_REQUEST_TIMEOUT = 408
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class Connections:
    """The connections of one server that serve no request just now, the longest idle first.

    Args:
        limit: Most connections, idle or not; a further one takes the place of an idle one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[BoundedProtocol, None] = OrderedDict()

    def note_idle(self, protocol: BoundedProtocol) -> None:
        """Put a connection at the end of the line."""
        self._idle[protocol] = None
        self._idle.move_to_end(protocol)

    def note_busy(self, protocol: BoundedProtocol) -> None:
        """Take a connection out of the line: it has a request, or is gone."""
        self._idle.pop(protocol, None)

    def make_room(self, num_connections: int) -> bool:
        """Close an idle connection if there are too many; False if all of them are at work."""
        if num_connections <= self._limit:
            return True
        if not self._idle:
            return False
        protocol, _ = self._idle.popitem(last=False)
        protocol.transport.abort()
        return True


# To the type checker, h11 is anything: see above.
class StreamingConnection(h11.Connection):  # type: ignore[misc]
    """h11's, with a short way for the pieces of a body that is sent in chunks.

    Each token of a stream is one. To h11 that is an event which changes nothing: 5 µs.
    """

    _sends_chunks = False

    def send(self, event: Any) -> Any:
        """Return the bytes to send for an event of ours."""
        if self._sends_chunks and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        output = super().send(event)
        if type(event) is h11.Response:
            # No value of a header has a line break.
            self._sends_chunks = b"\r\ntransfer-encoding: chunked\r\n" in output.lower()
        return output


class BoundedProtocol(h11_impl.H11Protocol):
    """One connection, with a timer for the header and one for the body of each request."""

    limits = LimitsConfig()
    idle = Connections(limits.max_connections)
    write_timeout = 0.0

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request as long as between two of them."""
        super().connection_made(transport)
        self.conn = StreamingConnection(h11.SERVER, self.limits.max_request_header_size)
        self._stall: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._awaited = ""
        if not self.idle.make_room(len(self.connections)):
            transport.abort()
            return
        self.idle.note_idle(self)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """Take what came, and start or stop the timer for what is missing."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._await("", 0.0)
        self._forget_stall()
        self._unset_keepalive_if_required()
        self.idle.note_busy(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client `write_timeout` seconds to take some of what waits for it."""
        super().pause_writing()
        if self._stall is None and self.write_timeout:
            self._stall = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        self._forget_stall()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Look at what a client has sent ahead."""
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too large a header, in the form of other errors."""
        if len(self.conn.trailing_data[0]) > self.limits.max_request_header_size:
            limit = self.limits.max_request_header_size
            words = f"the header is larger than {limit} bytes (--max-request-header-size)"
            self._refuse(_HEADERS_TOO_LARGE, words)
        else:
            self._refuse(400, "this is no valid HTTP request")

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch(self) -> None:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self.idle.note_busy(self)
            self._await("body", self.limits.request_body_timeout)
        elif state is not h11.IDLE:
            self.idle.note_busy(self)
            self._await("", 0.0)
        else:
            self.idle.note_idle(self)
            has_begun = bool(self.conn.trailing_data[0])
            self._await("header" if has_begun else "", self.limits.request_header_timeout)

    def _await(self, what: str, seconds: float) -> None:
        """Give the client `seconds` for `what`, from when it was first awaited."""
        if what == self._awaited:
            return
        self._awaited = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what and seconds:
            self._timer = self.loop.call_later(seconds, self._give_up, what, seconds)

    def _give_up(self, what: str, seconds: float) -> None:
        if not self.transport.is_closing():
            flag = f"--request-{what}-timeout"
            self._refuse(_REQUEST_TIMEOUT, f"the {what} was not complete in {seconds:g} s ({flag})")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, if no answer has begun, and close."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # The client may have done what makes any answer impossible.
            with contextlib.suppress(h11.LocalProtocolError):
                for event in (
                    h11.Response(status_code=status, headers=headers, reason=_REASONS[status]),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def bounded_protocol(
    limits: LimitsConfig, write_timeout: float, max_connections: int
) -> type[BoundedProtocol]:
    """Return the class of one server's connections.

    Args:
        limits: What a client may send, and how slowly.
        write_timeout: Seconds that it may leave waiting what it is sent. Counted from when the
            buffers are full until it has taken some of it; 0 for no end.
        max_connections: As many as wanted and possible.
    """
    attributes = {
        "limits": limits,
        "idle": Connections(max_connections),
        "write_timeout": write_timeout,
    }
    return type("BoundedProtocol", (BoundedProtocol,), attributes)


def raise_file_limit() -> int | None:
    """Let this process have as many open files as the system allows it, and return how many.

    The usual soft limit of 1,024 open files dates from ``select``. None is for no limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def num_possible_connections(wanted: int, num_files: int | None) -> int:
    """Return how many of `wanted` connections a process can have that may open `num_files`.

    A server without a file left can't even close what is too much: it can't accept it.
    """
    if num_files is None:
        return wanted
    possible = max(num_files - _OTHER_FILES, num_files // 2)
    if possible < wanted:
        logger.warning(
            "At most %d connections at once: this process may have no more than %d open files",
            possible,
            num_files,
        )
    return min(wanted, possible)
