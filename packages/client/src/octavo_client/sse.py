"""Server-sent events, from bytes to events (WHATWG HTML, section 9.2 "Server-sent events")."""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """One event: its type (``message`` unless the server named one) and its data."""

    event: str
    data: str


class SSEParser:
    """Cuts a byte stream into events, wherever the network has cut it.

    Lines may end in CR, LF or CRLF. An event that the stream ends in the middle
    of is dropped, as the standard says.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # the line that has not ended yet
        self._data: list[str] = []
        self._event = ""
        self._after_cr = False  # a CR ended the last line; an LF that follows belongs to it
        self._at_start = True

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Take the next bytes and return the events that they complete."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        events: list[ServerSentEvent] = []
        position = 0
        for end in _LINE_END.finditer(data):
            self._line += data[position : end.start()]
            position = end.end()
            event = self._end_line()
            if event is not None:
                events.append(event)
        self._after_cr = data.endswith(b"\r")
        self._line += data[position:]
        return events

    def _end_line(self) -> ServerSentEvent | None:
        line = bytes(self._line)
        self._line.clear()
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        # An empty name is a comment, which servers send to keep a connection alive.
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"data":
            self._data.append(text)
        elif name == b"event":
            self._event = text
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        event = None
        if self._data:
            event = ServerSentEvent(self._event or "message", "\n".join(self._data))
        self._data = []
        self._event = ""
        return event
