"""The messages between the hub and the fronts behind one address (``--api-server-count``).

One ZMQ DEALER (front) to ROUTER (hub) pair carries both directions, one msgpack value a
frame. To a front the hub looks much like an engine, so what is the same is the engine's own
message (`octavo_core.wire`).

    front                          hub
      │ ── FrontHello ─────────────▶ │   the process runs
      │ ◀─────── Welcome, ModelFound │   all settings, and where the model is
      │ ◀── EngineStatus (on change), Ready
      │ ── FrontReady ─────────────▶ │   requests are taken
      │ ── AddRequests, AbortRequests, UtilityCall ─▶
      │ ◀── EngineCoreOutputs, UtilityResult
      │ ── CallFronts ─────────────▶ │ ── FrontCall, to each front ─▶
      │ ◀────────────── FrontsAnswer │ ◀── FrontAnswer
      │ ── Report (every second) ──▶ │   what was counted
      │ ── PeerRequest, PeerLeft ──▶ │ ── the same, to the front that has the answer ─▶
      │ ◀────────────────── PeerPart │ ◀── PeerPart
      │ ◀── FrontLost, Drain, Failed
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_server.metrics_report import MetricsReport


class FrontHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a front process."""

    index: int


class FrontReady(msgspec.Struct, frozen=True, tag=True):
    """The front takes requests.

    Attributes:
        example_path: Of a request that the model answers.
        example_fields: Likewise, of its body.
    """

    example_path: str
    example_fields: dict[str, Any]


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Start the choices of one API request."""

    requests: list[wire.EngineCoreRequest]


class CallFronts(msgspec.Struct, frozen=True, tag=True):
    """Have every front, the one that asks too, do the same."""

    call_id: int
    method: str
    args: list[Any] = []


class FrontAnswer(msgspec.Struct, frozen=True, tag=True):
    """What a front has to answer to a `FrontCall`."""

    call_id: int
    result: Any


class Report(msgspec.Struct, frozen=True, tag=True):
    """What a front has counted since it started."""

    metrics: MetricsReport


class CollectMetrics(msgspec.Struct, frozen=True, tag=True):
    """Ask for what all fronts have counted."""

    call_id: int


class PeerRequest(msgspec.Struct, frozen=True, tag=True):
    """An HTTP request that another front has to answer: it has what the request is about.

    Attributes:
        call_id: The sender's.
        source: Index of the front that a client sent it to.
        target: Index of the front that is to answer.
    """

    call_id: int
    source: int
    target: int
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class PeerPart(msgspec.Struct, frozen=True, tag=True):
    """A part of the answer to a `PeerRequest`; the first one has the status and the headers."""

    call_id: int
    source: int
    body: bytes = b""
    is_last: bool = False
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []


class PeerLeft(msgspec.Struct, frozen=True, tag=True):
    """The client of a `PeerRequest` has left."""

    call_id: int
    source: int
    target: int


# Hub to front


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The hub's answer to `FrontHello`.

    Attributes:
        config: All settings, with those that are secret.
        sleep_level: How deep the operator lets the server sleep; None if it is awake.
        is_late: Others serve already: this one is in the place of a front that has crashed.
    """

    config: EngineConfig
    sleep_level: int | None
    is_late: bool


class ModelFound(msgspec.Struct, frozen=True, tag=True):
    """Where the model is, and its name in the API."""

    path: str
    name: str


class FrontLost(msgspec.Struct, frozen=True, tag=True):
    """A front has crashed: what was asked of it gets no answer."""

    index: int


class EngineStatus(msgspec.Struct, frozen=True, tag=True):
    """Where the engine is in its life; `octavo_server.engine_handle.EngineState` has the words."""

    state: str
    stage: str
    progress: float | None
    num_restarts: int


class FrontCall(msgspec.Struct, frozen=True, tag=True):
    """Do something that concerns the whole server."""

    call_id: int
    method: str
    args: list[Any] = []


class FrontsAnswer(msgspec.Struct, frozen=True, tag=True):
    """What the fronts have answered to a `CallFronts`."""

    call_id: int
    results: list[Any]


class Totals(msgspec.Struct, frozen=True, tag=True):
    """What all fronts have counted, those that are gone too, and the engine's load."""

    call_id: int
    metrics: MetricsReport
    stats: wire.SchedulerStats


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new requests, let those that run finish, and end; the second time, end now."""


ToHub = (
    FrontHello
    | FrontReady
    | AddRequests
    | wire.AbortRequests
    | wire.UtilityCall
    | CallFronts
    | FrontAnswer
    | Report
    | CollectMetrics
    | PeerRequest
    | PeerPart
    | PeerLeft
    | wire.Failed
)
FromHub = (
    Welcome
    | ModelFound
    | FrontLost
    | EngineStatus
    | wire.Ready
    | wire.EngineCoreOutputs
    | wire.UtilityResult
    | wire.Failed
    | FrontCall
    | FrontsAnswer
    | Totals
    | PeerRequest
    | PeerPart
    | PeerLeft
    | Drain
)

_encoder = msgspec.msgpack.Encoder()
_to_hub_decoder: msgspec.msgpack.Decoder[ToHub] = msgspec.msgpack.Decoder(ToHub)
_from_hub_decoder: msgspec.msgpack.Decoder[FromHub] = msgspec.msgpack.Decoder(FromHub)


def encode(message: ToHub | FromHub) -> bytes:
    """Encode one message as a frame."""
    return _encoder.encode(message)


def decode_to_hub(frame: bytes | memoryview) -> ToHub:
    """Decode a frame that a front sent."""
    return _to_hub_decoder.decode(frame)


def decode_from_hub(frame: bytes | memoryview) -> FromHub:
    """Decode a frame that the hub sent."""
    return _from_hub_decoder.decode(frame)
