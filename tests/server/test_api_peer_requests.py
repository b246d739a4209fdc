"""Requests that one front passes on to another."""

from __future__ import annotations

import asyncio
from typing import Any

from octavo_server.api.peer_requests import PeerDesk
from octavo_server.front_wire import FrontLost, PeerPart, PeerRequest, ToHub


class Link:
    """Keeps what is sent to the hub."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.sent: list[ToHub] = []

    def send(self, message: ToHub) -> None:
        self.sent.append(message)


async def two_parts(scope: Any, receive: Any, send: Any) -> None:
    """Answer a part at once, and the other one when everyone else had a turn."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    for _ in range(5):
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": scope["path"].encode()})


async def parts_for(lost: int | None) -> list[PeerPart]:
    """Have front 1 answer front 0, of which `lost` is gone in the middle."""
    link = Link(1)
    desk = PeerDesk(link, two_parts)
    desk.on_message(PeerRequest(1, 0, 1, "GET", "/secret", b"", [], b""))
    await asyncio.sleep(0)
    assert len(link.sent) == 1
    if lost is not None:
        desk.on_message(FrontLost(lost))
    for _ in range(20):
        await asyncio.sleep(0)
    return [message for message in link.sent if isinstance(message, PeerPart)]


def test_what_a_lost_front_has_asked_for_does_not_reach_its_successor() -> None:
    """The successor has the same index, and numbers its own requests from 1 on too."""
    assert [part.body for part in asyncio.run(parts_for(lost=0))] == [b""]


def test_another_front_that_is_lost_changes_nothing() -> None:
    for lost in (None, 2):
        parts = asyncio.run(parts_for(lost))
        assert [part.body for part in parts] == [b"", b"/secret"]
        assert parts[-1].is_last
