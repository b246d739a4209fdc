"""Tells routers which KV blocks an engine has, over ZMQ publish/subscribe.

Each message has three parts, as vLLM's: an empty topic, a sequence number of 8 bytes
(big-endian), and a `octavo_core.kv_events.KVEventBatch` in msgpack. A subscriber that
finds a gap in the numbers has missed events, and should forget what it knows.
"""

from __future__ import annotations

import re
import time

import msgspec
import zmq

from octavo_core.errors import ConfigError
from octavo_core.kv_events import KVEvent, KVEventBatch

# Events hold users' tokens, so no other machine may listen.
_LOCAL = re.compile(r"ipc://.+|tcp://(127\.\d+\.\d+\.\d+|localhost|\[::1\]):(\d+|\*)")

# Messages kept for a subscriber that does not read.
_HIGH_WATER_MARK = 10_000


class KVEventPublisher:
    """The publishing end.

    Args:
        endpoint: ZMQ address to bind, on this machine.

    Raises:
        ConfigError: The address is none, is in use, or can be reached from elsewhere.
    """

    def __init__(self, endpoint: str) -> None:
        if not _LOCAL.fullmatch(endpoint):
            raise ConfigError(
                f"kv_events_endpoint is {endpoint!r}, but events hold tokens of requests: use an "
                f"address of this machine, ipc://PATH or tcp://127.0.0.1:PORT.",
                field="kv_events_endpoint",
            )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.sndhwm = _HIGH_WATER_MARK
        self._socket.linger = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"kv_events_endpoint {endpoint!r} can't be bound: {error.strerror}.",
                field="kv_events_endpoint",
            ) from error
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, events: list[KVEvent]) -> None:
        """Send events, if there are any. Never waits for a subscriber."""
        if not events:
            return
        batch = self._encoder.encode(KVEventBatch(time.time(), events))
        self._socket.send_multipart((b"", self._sequence.to_bytes(8, "big"), batch))
        self._sequence += 1

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()
