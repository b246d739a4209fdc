from __future__ import annotations

import asyncio
from typing import Any

from octavo_server.api.responses_store import EventLog, ResponseStore, StoredResponse


def stored(size: int = 10, **fields: Any) -> StoredResponse:
    output = [{"type": "message", "text": "x" * size}]
    return StoredResponse(lambda: {"output": output}, [], [], **fields)


def test_what_was_not_used_for_longest_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    store.put("a", stored())
    store.put("b", stored())
    assert store.get("a") is not None
    store.put("c", stored())
    assert [store.get(key) is not None for key in "abc"] == [True, False, True]


def test_bytes_are_bounded() -> None:
    store = ResponseStore(max_responses=100, max_bytes=5000)
    for index in range(20):
        store.put(str(index), stored(1000))
        assert store.num_bytes <= 5000
    assert len(store) == 4
    assert store.get("19") is not None
    for key in ("16", "17", "18", "19", "nope"):
        store.remove(key)
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_that_grows_is_counted_once() -> None:
    store = ResponseStore()
    store.put("a", stored(10))
    small = store.num_bytes
    store.put("a", stored(1010))
    assert store.num_bytes == small + 1000


def test_what_is_still_computed_stays() -> None:
    store = ResponseStore(max_responses=1)
    store.put("a", stored(cancel=lambda: None))
    store.put("b", stored())
    assert store.get("a") is not None
    assert store.get("b") is None


async def test_followers_get_all_events_wherever_they_start() -> None:
    log = EventLog()
    log.append(b"0")
    log.append(b"1")

    async def read(start: int) -> bytes:
        return b"".join([data async for data in log.follow(start)])

    readers = [asyncio.create_task(read(start)) for start in (0, 1, 3)]
    await asyncio.sleep(0)
    for data in (b"2", b"3"):
        log.append(data)
        await asyncio.sleep(0)
    log.end()
    assert [await reader for reader in readers] == [b"0123", b"123", b"3"]
    assert await read(0) == b"0123"
