import msgspec
import pytest

from octavo_core import wire
from octavo_core.config import resolve_config
from octavo_core.sampling_params import SamplingParams

REQUEST = wire.EngineCoreRequest(
    "a", [1, 2, 3], SamplingParams(seed=5, stop=("x",)), 1.5, 2, "salt", [9]
)
OUTPUT = wire.EngineCoreOutput(
    "a", [4], "stop", 7, [wire.TokenLogprobs([4, 5], [-0.5, -1.0], 1)], 16
)


@pytest.mark.parametrize(
    "message",
    [
        wire.Configure(resolve_config({"block_size": 8})),
        wire.AddRequest(REQUEST),
        wire.AbortRequests(["a", "b"]),
        wire.UtilityCall(1, "reset_prefix_cache", []),
        wire.Shutdown(),
    ],
)
def test_messages_to_the_engine(message: wire.ToEngine) -> None:
    assert wire.decode_to_engine(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(123, "0.1.0"),
        wire.Loading("loading weights", 0.5),
        wire.Ready(8192, 100, 16, 1600, 0.2, "float32", "cpu"),
        wire.EngineCoreOutputs([OUTPUT, wire.EngineCoreOutput("b", [1])], wire.SchedulerStats(1)),
        wire.UtilityResult(1, {"a": 1}),
        wire.Failed("no", "ConfigError", "block_size"),
    ],
)
def test_messages_to_the_front(message: wire.ToFront) -> None:
    assert wire.decode_to_front(memoryview(wire.encode(message))) == message


def test_other_versions_and_rubbish_are_refused() -> None:
    frame = wire.encode(wire.Shutdown())
    for bad in (b"", b"\x02" + frame[1:], frame[:-1], b"\x01\xc1", frame[:1] + b"\x80"):
        with pytest.raises(wire.WireError):
            wire.decode_to_engine(bad)


def test_a_field_from_a_newer_sender_is_skipped() -> None:
    newer = [*msgspec.to_builtins(REQUEST), "something new"]
    frame = wire.encode(wire.Shutdown())[:1] + msgspec.msgpack.encode(
        {"type": "AddRequest", "request": newer, "more": 1}
    )
    assert wire.decode_to_engine(frame) == wire.AddRequest(REQUEST)


def test_a_request_with_impossible_parameters_is_refused_at_the_door() -> None:
    raw = msgspec.to_builtins(wire.AddRequest(REQUEST))
    raw["request"][2]["temperature"] = 99.0
    frame = wire.encode(wire.Shutdown())[:1] + msgspec.msgpack.encode(raw)
    with pytest.raises(wire.WireError, match="temperature"):
        wire.decode_to_engine(frame)
