"""What an engine and its worker process say to each other: msgpack of tagged structs.

Commands are carried out in order. Each but `Execute` gets one final reply
(`Loaded`, `Done`, `Sampled` or `Failure`); `Progress` may come before it, and `Heartbeat` at
any time.
"""

from __future__ import annotations

import msgspec

from octavo_core import errors
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Initialize the device and load the weights."""


class DetermineAvailableMemory(msgspec.Struct, frozen=True, tag=True):
    """Measure what is left for the KV cache."""


class InitializeKVCache(msgspec.Struct, frozen=True, tag=True):
    """Allocate the KV cache and the host tier."""

    num_blocks: int
    num_host_blocks: int = 0


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """Run each kind of work once."""


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Run the forward pass of one step. Not answered.

    Attributes:
        outputs: What steps before it sampled, for those stages of a pipeline that don't.
    """

    scheduler_output: SchedulerOutput
    outputs: list[ModelRunnerOutput] = []


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Sample from the oldest step not yet sampled."""

    grammar: GrammarOutput | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process. Not answered."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far loading is."""

    stage: str
    progress: float | None = None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is there."""

    device: str
    dtype: str
    kv_cache_dtype: str
    device_memory: int | None = None


class Done(msgspec.Struct, frozen=True, tag=True):
    """A command is carried out; ``value`` is its result if it has one."""

    value: int | None = None


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Sample`."""

    output: ModelRunnerOutput


class Failure(msgspec.Struct, frozen=True, tag=True):
    """A command failed. ``kind`` is the name of the error's class."""

    kind: str
    message: str
    field: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life of the worker's process. It answers nothing."""


Command = (
    LoadModel | DetermineAvailableMemory | InitializeKVCache | WarmUp | Execute | Sample | Stop
)
Reply = Progress | Loaded | Done | Sampled | Failure | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Decode what an engine sent."""
    return _command_decoder.decode(data)


def decode_reply(data: bytes) -> Reply:
    """Decode what a worker sent."""
    return _reply_decoder.decode(data)


def failure_of(error: Exception) -> Failure:
    """Describe an error so that it can cross to another process."""
    field = error.field if isinstance(error, errors.UserError) else None
    return Failure(type(error).__name__, str(error), field)


def error_of(failure: Failure) -> errors.OctavoError:
    """Make the error again. One that is not of Octavo's own kinds becomes an EngineError."""
    error = errors.error_named(
        failure.kind, failure.message, failure.field, default=errors.EngineError
    )
    if type(error) is errors.EngineError and failure.kind != "EngineError":
        return errors.EngineError(f"{failure.kind} in a worker: {failure.message}")
    return error
