"""What HTTP/1.1 connections are cut for: clients that do not send, or do not read."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for a request's line and headers, from the connection's first byte on or, before
# that, from its opening. A client that sends a byte a minute must not hold a place for ever.
HEADER_TIMEOUT = 60.0


def protocol_class(
    write_timeout: float, header_timeout: float = HEADER_TIMEOUT
) -> type[asyncio.Protocol]:
    """Return a protocol for uvicorn that cuts stalled connections.

    Args:
        write_timeout: Seconds that a client may leave waiting what it is sent. Counted from when
            the buffers are full until the client has taken some of it.
        header_timeout: Seconds for the head of a request.
    """

    class Guarded(_GuardedProtocol):
        pass

    Guarded.write_timeout = write_timeout
    Guarded.header_timeout = header_timeout
    return Guarded


class _GuardedProtocol(H11Protocol):
    write_timeout: float
    header_timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall: asyncio.TimerHandle | None = None
        self._slow_head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._slow_head is None:
            self._await_head()  # a kept-alive connection begins another one

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def _await_head(self) -> None:
        self._slow_head = self.loop.call_later(self.header_timeout, self.transport.abort)

    def _forget_head(self) -> None:
        if self._slow_head is not None:
            self._slow_head.cancel()
            self._slow_head = None

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
