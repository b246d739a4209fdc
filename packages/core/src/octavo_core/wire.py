"""The messages between a front process and the engine process.

One ZMQ DEALER (engine) to ROUTER (front) pair carries both directions. A frame
is one version byte followed by one msgpack value: a tagged struct of the union
for its direction. Nothing is pickled. New fields come last, with defaults, so
that a reader of the same `WIRE_VERSION` can skip what it does not know.

    engine                         front
      │ ── Hello ──────────────────▶ │   the process runs
      │ ◀───────────── EngineConfig │   Configure
      │ ── Loading (many) ─────────▶ │   stage and progress, for /health
      │ ── Ready ──────────────────▶ │   limits that start-up found
      │ ◀── AddRequest, AbortRequests, UtilityCall, Shutdown
      │ ── EngineCoreOutputs, UtilityResult ─▶
      │ ── Heartbeat (for ever) ───▶ │   the process is not stopped
      │ ── Failed ─────────────────▶ │   the last word of an engine that can't go on
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo_core.config import EngineConfig
from octavo_core.errors import EngineError
from octavo_core.pooling_params import PooledOutput, PoolingParams
from octavo_core.sampling_params import SamplingParams

WIRE_VERSION = 1
_VERSION_BYTE = bytes([WIRE_VERSION])


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens that stand for one image, sound or the like.

    Attributes:
        digest: Hash of the contents: equal placeholders with other contents are other tokens.
        start: Position of the first token.
        length: Number of tokens.
    """

    digest: str
    start: int
    length: int


class EngineCoreRequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One answer to be computed: what crosses from the front to the engine.

    Attributes:
        request_id: Unique among the requests in flight.
        prompt_token_ids: Prompt, 1 to ``max_model_len - 1`` ids within the vocabulary.
        sampling_params: With ``seed``, ``max_tokens`` and ``eos_token_ids`` filled in.
        arrival_time: Seconds since the epoch.
        priority: Lower runs earlier, under the priority policy.
        cache_salt: Keeps this request's prefix-cache blocks apart from others'.
        output_token_ids: Tokens that are already there, when a request is resumed
            on a new engine.
        tenant: Whom the request is counted for, under the fair-share policy.
        deadline: Seconds since the epoch after which nobody wants the answer any more.
        adapter: Name of the adapter that changes the model's weights for this request.
        media: Images and the like that stand for prompt tokens.
        is_resumed: It ran on an engine that is gone, so the line has no say in it.
        pooling_params: Asks for vectors in place of an answer; nothing is sampled.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: list[int] = []
    tenant: str | None = None
    deadline: float | None = None
    adapter: str | None = None
    media: list[MediaSpan] = []
    is_resumed: bool = False
    pooling_params: PoolingParams | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-probabilities (natural log, before temperature and filters) at one position.

    Attributes:
        token_ids: The sampled token, then the ``logprobs`` likeliest in order.
        logprobs: One value for each of ``token_ids``.
        rank: Rank of the sampled token, 1 is the likeliest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one step did for one request.

    Attributes:
        new_token_ids: Tokens sampled in this step, a stop or end token included.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` in the last output.
        stop_reason: The id out of ``stop_token_ids`` that ended the request.
        logprobs: One entry for each new token, if they were asked for.
        num_cached_tokens: Prompt tokens that came from the prefix cache; told with the
            first token and with the last output.
        error: What went wrong, with finish_reason ``error``; for a person to read.
        error_kind: Name of the class of `octavo_core.errors` that the front raises.
        prompt_logprobs: One entry for each prompt token but the first, if they were asked
            for; in the first output.
        scheduled_time: When the request first ran, in seconds since the epoch; told with
            `num_preemptions` in the first output after it was admitted, and in the last one.
        num_preemptions: How often it had to go back in line so far.
        pooled: What a pooling request asked for, in its only output.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_kind: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    scheduled_time: float = 0.0
    num_preemptions: int = 0
    pooled: PooledOutput | None = None


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's load after a step."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_waiting_tokens: int = 0
    host_cache_hits: int = 0
    host_cache_usage: float = 0.0


# Front to engine


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The front's answer to `Hello`."""

    config: EngineConfig


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Start one request."""

    request: EngineCoreRequest


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """End requests whose clients have left. Unknown ids are ignored. Nothing is answered."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, frozen=True, tag=True):
    """Call one of the engine's listed operator functions."""

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine. Requests that still run are dropped."""


# Engine to front


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of an engine process."""

    pid: int
    version: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far start-up is: ``stage`` in words, ``progress`` from 0 to 1 if it is known."""

    stage: str
    progress: float | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Start-up is done; these limits hold for every request."""

    max_model_len: int
    num_blocks: int
    block_size: int
    kv_cache_tokens: int
    max_concurrency: float
    dtype: str
    device: str


class EngineCoreOutputs(msgspec.Struct, frozen=True, tag=True):
    """All that one step has to tell."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None


class UtilityResult(msgspec.Struct, frozen=True, tag=True):
    """Answer to a `UtilityCall`: a result, or an error for a person."""

    call_id: int
    result: Any = None
    error: str | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine can't go on. ``kind`` names a class of `octavo_core.errors`."""

    message: str
    kind: str
    field: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life. It comes from a socket, and so with an identity, of its own.

    Attributes:
        step: Number of the step that runs just now; None between two of them.
    """

    step: int | None = None


ToEngine = Configure | AddRequest | AbortRequests | UtilityCall | Shutdown
ToFront = Hello | Loading | Ready | EngineCoreOutputs | UtilityResult | Failed | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_to_front_decoder = msgspec.msgpack.Decoder(ToFront)


class WireError(EngineError):
    """A frame that this version of Octavo can't read."""


def encode(message: ToEngine | ToFront) -> bytes:
    """Encode one message as a frame."""
    return _VERSION_BYTE + _encoder.encode(message)


def decode_to_engine(frame: bytes | memoryview) -> ToEngine:
    """Decode a frame that a front sent.

    Raises:
        WireError: The frame has another version, or is no such message.
    """
    message: ToEngine = _decode(frame, _to_engine_decoder)
    return message


def decode_to_front(frame: bytes | memoryview) -> ToFront:
    """Decode a frame that an engine sent.

    Raises:
        WireError: The frame has another version, or is no such message.
    """
    message: ToFront = _decode(frame, _to_front_decoder)
    return message


def _decode(frame: bytes | memoryview, decoder: Any) -> Any:
    view = memoryview(frame)
    if len(view) == 0 or view[0] != WIRE_VERSION:
        found = view[0] if len(view) else "nothing"
        raise WireError(f"frame of wire version {found}, expected {WIRE_VERSION}")
    try:
        return decoder.decode(view[1:])
    except msgspec.DecodeError as error:
        raise WireError(f"unreadable frame: {error}") from error
