"""The engine's loop, driven over a real socket by a front made of ten lines."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from octavo_core import wire
from octavo_core.config import CacheConfig, EngineConfig
from octavo_core.engine_core import EngineCore
from octavo_core.errors import ConfigError, ModelError
from octavo_core.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
from octavo_core.sampling_params import SamplingParams
from octavo_server import engine_process
from octavo_server.engine_process import EngineProcess, FrontLink, serve_engine
from octavo_server.kv_event_publisher import KVEventPublisher
from support.engine_fakes import FakeExecutor, expected_output, make_request, tiny_spec
from support.scripted_engine import EXIT_CODE, run_dying_start, run_slow_start


class FrontEnd:
    """The front's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.address = f"ipc://{path / 'engine.sock'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.RCVTIMEO, 10_000)
        self._socket.bind(self.address)
        self._identity = b""

    def receive(self) -> wire.ToFront:
        """Return the next message that is no heartbeat."""
        while True:
            identity, frame = self._socket.recv_multipart()
            message = wire.decode_to_front(frame)
            if not isinstance(message, wire.Heartbeat):
                self._identity = identity
                return message

    def receive_until(self, kind: type) -> wire.ToFront:
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def send(self, message: wire.ToEngine) -> None:
        self._socket.send_multipart([self._identity, wire.encode(message)])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    end = FrontEnd(tmp_path)
    yield end
    end.close()


@pytest.fixture(autouse=True)
def _keep_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The loop runs in a thread here, where signals can't be set.
    monkeypatch.setattr(engine_process, "_ignore_sigterm", lambda: None)


class EngineThread:
    """`serve_engine` in a thread, with a fake executor."""

    def __init__(self, address: str, executor: FakeExecutor | None = None) -> None:
        self.executor = executor or FakeExecutor(16, 128)
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(address,))
        self._thread.start()

    def _run(self, address: str) -> None:
        self.exit_code = serve_engine(FrontLink(address), self.build, preload="json")

    def build(self, config: EngineConfig) -> EngineCore:
        if config.model_path == "broken":
            raise ModelError("no weights.", field="model")
        return EngineCore(config, tiny_spec(), self.executor)

    def join(self) -> int | None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.exit_code


def handshake(
    front_end: FrontEnd,
    config: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
) -> list[wire.ToFront]:
    assert isinstance(hello := front_end.receive(), wire.Hello)
    assert hello.pid == os.getpid()
    front_end.send(wire.Configure(config))
    messages = []
    while not messages or not isinstance(messages[-1], wire.Ready):
        messages.append(front_end.receive())
    return messages


def collect(front_end: FrontEnd, request_ids: set[str]) -> dict[str, list[int]]:
    """Read outputs until all `request_ids` have ended."""
    tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    open_ids = set(request_ids)
    while open_ids:
        message = front_end.receive_until(wire.EngineCoreOutputs)
        assert isinstance(message, wire.EngineCoreOutputs)
        for output in message.outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason:
                open_ids.remove(output.request_id)
    return tokens


def test_a_whole_life(front_end: FrontEnd) -> None:
    engine = EngineThread(front_end.address)
    *loading, ready = handshake(front_end)
    assert all(isinstance(message, wire.Loading) for message in loading)
    assert wire.Loading("loading", 1.0) in loading
    assert isinstance(ready, wire.Ready)
    assert ready.max_model_len == 4096

    for name in ("a", "b"):
        front_end.send(wire.AddRequest(make_request(name, [1, 2, 3], max_tokens=5)))
    expected = expected_output([1, 2, 3], 5)
    assert collect(front_end, {"a", "b"}) == {"a": expected, "b": expected}

    front_end.send(wire.Shutdown())
    assert engine.join() == 0
    assert engine.executor.is_shut_down


def test_requests_join_a_running_batch_and_an_abort_ends_one(front_end: FrontEnd) -> None:
    engine = EngineThread(front_end.address)
    handshake(front_end)
    endless = make_request("endless", [1], max_tokens=4000)
    front_end.send(wire.AddRequest(endless))
    front_end.receive_until(wire.EngineCoreOutputs)
    front_end.send(wire.AddRequest(make_request("short", [5], max_tokens=2)))
    while True:
        message = front_end.receive_until(wire.EngineCoreOutputs)
        assert isinstance(message, wire.EngineCoreOutputs)
        if any(o.request_id == "short" and o.finish_reason for o in message.outputs):
            break
    front_end.send(wire.AbortRequests(["endless", "unknown"]))
    front_end.send(wire.AddRequest(make_request("last", [7], max_tokens=1)))
    while True:
        message = front_end.receive_until(wire.EngineCoreOutputs)
        assert isinstance(message, wire.EngineCoreOutputs)
        if any(output.request_id == "last" for output in message.outputs):
            break
    assert message.stats is not None
    assert message.stats.num_running == 0
    front_end.send(wire.Shutdown())
    assert engine.join() == 0


def test_memory_is_given_back_once_when_there_is_nothing_more_to_do(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = threading.Semaphore(0)
    monkeypatch.setattr(engine_process, "give_back_memory", given_back.release)
    monkeypatch.setattr(engine_process, "_HEALTH_INTERVAL", 0.02)
    engine = EngineThread(front_end.address)
    handshake(front_end)
    assert given_back.acquire(timeout=10)
    for name in ("a", "b"):
        assert not given_back.acquire(timeout=0.2)  # some ten looks later
        front_end.send(wire.AddRequest(make_request(name, [1, 2, 3], max_tokens=5)))
        collect(front_end, {name})
        assert given_back.acquire(timeout=10)
    front_end.send(wire.Shutdown())
    assert engine.join() == 0


def test_the_load_is_zero_after_all_clients_have_left(front_end: FrontEnd) -> None:
    """Case M03."""
    engine = EngineThread(front_end.address)
    handshake(front_end)
    names = [f"r{i}" for i in range(32)]
    for name in names:
        front_end.send(wire.AddRequest(make_request(name, [1, 2, 3], max_tokens=4000)))
    while True:
        message = front_end.receive_until(wire.EngineCoreOutputs)
        assert isinstance(message, wire.EngineCoreOutputs)
        assert message.stats is not None
        if message.stats.num_running == len(names):
            break
    front_end.send(wire.AbortRequests(names))
    while message.stats.num_running:  # it is told without a new request, or this times out
        message = front_end.receive_until(wire.EngineCoreOutputs)
        assert isinstance(message, wire.EngineCoreOutputs)
        assert message.stats is not None
    assert (message.stats.num_waiting, message.stats.kv_cache_usage) == (0, 0.0)
    front_end.send(wire.Shutdown())
    assert engine.join() == 0


def test_a_refused_request_is_answered(front_end: FrontEnd) -> None:
    engine = EngineThread(front_end.address)
    handshake(front_end)
    request = wire.EngineCoreRequest("long", [1] * 5000, SamplingParams(max_tokens=1))
    front_end.send(wire.AddRequest(request))
    message = front_end.receive_until(wire.EngineCoreOutputs)
    assert isinstance(message, wire.EngineCoreOutputs)
    (output,) = message.outputs
    assert output.finish_reason == "error"
    assert output.error_kind == "ContextLengthError"
    front_end.send(wire.Shutdown())
    engine.join()


def test_an_unknown_function_is_answered(front_end: FrontEnd) -> None:
    engine = EngineThread(front_end.address)
    handshake(front_end)
    front_end.send(wire.UtilityCall(3, "__import__", ["os"]))
    result = front_end.receive()
    assert isinstance(result, wire.UtilityResult)
    assert (result.call_id, result.result) == (3, None)
    assert "__import__" in (result.error or "")
    front_end.send(wire.Shutdown())
    engine.join()


def test_the_prefix_cache_is_reset_and_routers_hear_of_it(
    front_end: FrontEnd, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    engine = EngineThread(front_end.address)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(endpoint)
        handshake(front_end, EngineConfig(cache=CacheConfig(kv_events_endpoint=endpoint)))
        while not subscriber.poll(200):  # until it has subscribed, events pass it by
            front_end.send(wire.UtilityCall(1, "reset_prefix_cache"))
            result = front_end.receive_until(wire.UtilityResult)
            assert result == wire.UtilityResult(1)
        first = receive_events(subscriber)
        assert first.events == [AllBlocksCleared()]
        front_end.send(wire.AddRequest(make_request("a", list(range(20)), max_tokens=1)))
        collect(front_end, {"a"})
        events = first.events
        while not isinstance(events[-1], BlockStored):
            events = receive_events(subscriber).events
        assert events[-1].token_ids == list(range(16))
        front_end.send(wire.Shutdown())
        assert engine.join() == 0


def receive_events(subscriber: zmq.Socket[bytes]) -> KVEventBatch:
    assert subscriber.poll(10_000)
    topic, _, batch = subscriber.recv_multipart()
    assert topic == b""
    return msgspec.msgpack.decode(batch, type=KVEventBatch)


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5557", "tcp://*:5557", "inproc://x", "x"])
def test_events_are_not_published_to_other_machines(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_endpoint"):
        KVEventPublisher(endpoint)


def test_a_model_error_is_told(front_end: FrontEnd) -> None:
    engine = EngineThread(front_end.address)
    front_end.receive()
    front_end.send(wire.Configure(EngineConfig(model_path="broken")))
    failed = front_end.receive_until(wire.Failed)
    assert failed == wire.Failed("no weights.", "ModelError", "model")
    assert engine.join() == 1


def test_a_broken_frame_ends_the_engine_with_a_word(front_end: FrontEnd) -> None:
    engine = EngineThread(front_end.address)
    handshake(front_end)
    front_end._socket.send_multipart([front_end._identity, b"\x01\xc1"])
    failed = front_end.receive_until(wire.Failed)
    assert isinstance(failed, wire.Failed)
    assert failed.kind == "EngineDeadError"
    assert engine.join() == 1
    assert engine.executor.is_shut_down


def test_an_idle_engine_uses_no_cpu(front_end: FrontEnd) -> None:
    engine = EngineThread(front_end.address)
    handshake(front_end)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    front_end.send(wire.Shutdown())
    engine.join()


def test_the_sockets_directory_is_private_and_goes_away() -> None:
    process = EngineProcess("info", run_dying_start)
    directory = Path(process.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    process.process.join(20)
    assert f"exit code {EXIT_CODE}" in process.describe_end()
    process.end(grace=1.0)
    process.end(grace=1.0)
    assert not directory.exists()


def test_a_long_temporary_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(engine_process.tempfile, "gettempdir", lambda: str(deep))
    directory = engine_process._make_private_directory()
    directory.rmdir()
    assert len(str(directory)) < 90


def test_sigterm_ends_an_engine_that_loads(tmp_path: Path) -> None:
    process = EngineProcess("info", run_slow_start)
    process.process.terminate()
    started = time.monotonic()
    process.end(grace=10.0)
    assert time.monotonic() - started < 5
    assert process.process.exitcode == -15
