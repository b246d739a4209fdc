"""Keeps answers of the Responses API, so that later requests can go on from them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_STORED_RESPONSES = 1024
MAX_STORED_BYTES = 256 * 1024 * 1024

Item = dict[str, Any]


class EventLog:
    """The events of an answer that is computed in the background, for all who follow it."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()

    def append(self, event: bytes) -> None:
        """Add an event; its place is its sequence number."""
        self._events.append(event)
        self._wake()

    def end(self) -> None:
        """Tell the followers that nothing comes any more."""
        self._ended = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `start` on, those of now and those to come."""
        while True:
            news = self._news
            if start < len(self._events):
                yield b"".join(self._events[start:])
                start = len(self._events)
            elif self._ended:
                return
            else:
                await news.wait()

    @property
    def num_bytes(self) -> int:
        """Size of all events."""
        return sum(map(len, self._events))

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


@dataclass
class StoredResponse:
    """An answer, and what it was the answer to.

    Attributes:
        read: Returns the answer as it is now.
        input_items: What this request brought.
        history: Items of the conversation before them.
        instructions: System message of this request alone.
        log: Events, if the answer is computed in the background.
        cancel: Ends the computation; None once it has ended.
    """

    read: Callable[[], dict[str, Any]]
    input_items: list[Item]
    history: list[Item]
    log: EventLog | None = None
    cancel: Callable[[], None] | None = None
    task: asyncio.Task[None] | None = None
    num_bytes: int = field(default=0)

    def conversation(self) -> list[Item]:
        """Return all items that a next request goes on from."""
        return [*self.history, *self.input_items, *self.read()["output"]]


class ResponseStore:
    """The latest responses, bounded in number and in bytes.

    What was not used for the longest time goes first; an answer that is still computed stays.

    Args:
        max_responses: 0 stores nothing.
        max_bytes: Of all responses as JSON. Conversations share their items.
    """

    def __init__(
        self, max_responses: int = MAX_STORED_RESPONSES, max_bytes: int = MAX_STORED_BYTES
    ) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        """Size of all responses as JSON."""
        return self._num_bytes

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, or note that it has grown."""
        if self.max_responses == 0:
            return
        self.remove(response_id)
        stored.num_bytes = _size(stored)
        self._num_bytes += stored.num_bytes
        self._responses[response_id] = stored
        self._evict()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, which then counts as used."""
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    def remove(self, response_id: str) -> StoredResponse | None:
        """Forget a response, and return it if there was one."""
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes
        return stored

    def _evict(self) -> None:
        for response_id, stored in list(self._responses.items()):
            if len(self) <= self.max_responses and self._num_bytes <= self.max_bytes:
                return
            if stored.cancel is None:
                self.remove(response_id)


def _size(stored: StoredResponse) -> int:
    content = [stored.read(), stored.input_items]
    return len(msgspec.json.encode(content)) + (stored.log.num_bytes if stored.log else 0)
