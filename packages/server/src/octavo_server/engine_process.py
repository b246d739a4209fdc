"""The engine process: a start-up handshake, then the loop that steps the engine.

The loop needs no thread of its own for input. While there is work it empties the
socket between two steps without waiting; with no work it sleeps in ``poll``, so an
idle engine uses no CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import setproctitle
import zmq

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import UserError
from octavo_core.executor import ProgressCallback
from octavo_core.kv_events import KVEvent
from octavo_core.process import (
    BEATS_PER_TIMEOUT,
    StepCounter,
    end_of_start_up,
    exit_with_parent,
    give_back_memory,
    start_heartbeat,
    start_without_interrupts,
    without_collections,
)
from octavo_server import __version__
from octavo_server.kv_event_publisher import KVEventPublisher
from octavo_server.logging_setup import configure_logging

logger = logging.getLogger(__name__)

EngineTarget = Callable[[str, str], None]
"""What an engine process runs: called with the ZMQ address and the log level."""

# Seconds between two looks at the workers while there is nothing to do.
_HEALTH_INTERVAL = 1.0
# The first look comes soon: the engine also uses it to get ready for what is rarely asked for.
_FIRST_HEALTH_INTERVAL = 0.1
# A Unix socket's path holds 107 bytes; the file's own name takes some.
_MAX_SOCKET_DIRECTORY = 90


class Engine(Protocol):
    """What the loop needs of `octavo_core.engine_core.EngineCore`."""

    def start(self, on_progress: ProgressCallback) -> wire.Ready: ...
    def add_request(self, request: wire.EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def check_health(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def take_kv_events(self) -> list[KVEvent]: ...
    def step(self) -> wire.EngineCoreOutputs: ...
    def stats(self) -> wire.SchedulerStats: ...
    def shutdown(self) -> None: ...


def run_engine(address: str, log_level: str) -> None:
    """Run one engine until the front says to stop; the target of a spawned process.

    A mistake in the configuration or the model is told to the front, which shows it;
    so is any other error, after its traceback was logged here.

    Args:
        address: ZMQ address that the front listens on.
        log_level: Least severe line logged.
    """
    _run_engine(address, log_level, preload="octavo_worker.executors.uniproc")


def run_engine_beside_workers(address: str, log_level: str) -> None:
    """Like `run_engine`, where the workers have processes of their own: without torch."""
    _run_engine(address, log_level, preload="octavo_worker.executors.multiproc")


def engine_target(distributed_executor_backend: str) -> EngineTarget:
    """Return what the engine process has to run for an executor."""
    return run_engine if distributed_executor_backend == "uni" else run_engine_beside_workers


def _run_engine(address: str, log_level: str, preload: str) -> None:
    exit_with_parent(Path(address.removeprefix("ipc://")).parent)
    setproctitle.setproctitle("octavo: engine")
    configure_logging(log_level, "engine")
    sys.exit(serve_engine(FrontLink(address), _build_engine, preload))


def serve_engine(
    link: FrontLink,
    build: Callable[[EngineConfig], Engine],
    preload: str,
) -> int:
    """Shake hands over `link`, start the engine that `build` returns, and run its loop.

    Args:
        link: The connected socket.
        build: Makes the engine from the front's configuration.
        preload: Module to import while the front still finds the model: torch takes seconds.

    Returns:
        Exit code: 0 if the front ended it, 1 after an error that the front was told.
    """
    engine: Engine | None = None
    publisher: KVEventPublisher | None = None
    try:
        link.send(wire.Hello(os.getpid(), __version__))
        link.report_progress("importing the executor", None)
        with without_collections():
            importlib.import_module(preload)
        link.report_progress("waiting for the model's files", None)
        config = link.receive_config()
        if config.cache.kv_events_endpoint is not None:
            publisher = KVEventPublisher(config.cache.kv_events_endpoint)
        engine = build(config)
        ready = engine.start(link.report_progress)
        link.start_heartbeat(config.parallel.heartbeat_timeout)
        link.send(ready)
        # While it loads, SIGTERM ends the process at once. Now the front decides: a service
        # manager that signals all processes must not cut off answers that the front waits for.
        _ignore_sigterm()
        end_of_start_up()
        _run_loop(engine, link, publisher)
        return 0
    except UserError as error:
        link.send(wire.Failed(error.message, type(error).__name__, error.field))
        return 1
    except Exception as error:
        logger.exception("The engine failed")
        link.send(wire.Failed(f"{type(error).__name__}: {error}", "EngineDeadError"))
        return 1
    finally:
        if engine is not None:
            engine.shutdown()
        if publisher is not None:
            publisher.close()
        link.close()


class FrontLink:
    """The engine's end of the socket.

    Args:
        address: ZMQ address that the front listens on.

    Attributes:
        steps: What the main thread is at; heartbeats tell it.
    """

    def __init__(self, address: str) -> None:
        self.steps = StepCounter()
        self._address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._heart: threading.Event | None = None
        self._heart_socket: zmq.Socket[bytes] | None = None

    def receive_config(self) -> EngineConfig:
        """Wait for the front's answer to `Hello`."""
        message = wire.decode_to_engine(self._socket.recv())
        if not isinstance(message, wire.Configure):
            raise wire.WireError(f"expected Configure, got {type(message).__name__}")
        return message.config

    def report_progress(self, stage: str, progress: float | None) -> None:
        """Tell the front how far start-up is, for ``/health``."""
        self.send(wire.Loading(stage, progress))

    def send(self, message: wire.ToFront) -> None:
        """Send one message."""
        self._socket.send(wire.encode(message))

    def receive(self, timeout: float = 0.0) -> wire.ToEngine | None:
        """Return the next message; None if there is none within `timeout` seconds."""
        if timeout and not self._socket.poll(int(timeout * 1000)):
            return None
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return wire.decode_to_engine(frame)

    def start_heartbeat(self, timeout: float) -> None:
        """Tell the front from now on that this process runs, whatever a step takes.

        Args:
            timeout: Seconds after which the front gives a silent engine up.
        """
        # A socket belongs to one thread, so the heart has its own. A front that doesn't read
        # must not make beats pile up.
        self._heart_socket = self._context.socket(zmq.DEALER)
        self._heart_socket.set(zmq.SNDHWM, BEATS_PER_TIMEOUT)
        self._heart_socket.connect(self._address)
        heart_socket = self._heart_socket

        def beat() -> None:
            # Full, or closed in the meantime: nobody waits for this one.
            with contextlib.suppress(zmq.ZMQError):
                heart_socket.send(wire.encode(wire.Heartbeat(self.steps.running)), zmq.NOBLOCK)

        self._heart = start_heartbeat(timeout, beat)

    def close(self) -> None:
        """Send what is left, for at most a second, and close."""
        if self._heart is not None and self._heart_socket is not None:
            self._heart.set()
            self._heart_socket.close(linger=0)
        self._socket.close(linger=1000)
        self._context.term()


def _run_loop(engine: Engine, link: FrontLink, publisher: KVEventPublisher | None) -> None:
    """Step while there is work and sleep while there is none, until `Shutdown`."""
    interval = _FIRST_HEALTH_INTERVAL
    may_hold_memory = True
    while True:
        message = link.receive(0.0 if engine.has_unfinished_requests() else interval)
        while message is not None:
            if isinstance(message, wire.Shutdown):
                return
            with link.steps:
                _handle(engine, link, message)
            message = link.receive()
        if engine.has_unfinished_requests():
            # Sending is not in it: how quickly the front reads is no fault of ours.
            with link.steps:
                outputs = engine.step()
            link.send(outputs)
            may_hold_memory = True
        else:
            with link.steps:
                engine.check_health()
                if may_hold_memory and interval == _HEALTH_INTERVAL:
                    # 40 MB after prompts of 1,000 tokens, 18 after getting ready for grammars.
                    give_back_memory()
                    may_hold_memory = False
            interval = _HEALTH_INTERVAL
        if publisher is not None:
            publisher.publish(engine.take_kv_events())


def _handle(engine: Engine, link: FrontLink, message: wire.ToEngine) -> None:
    match message:
        case wire.AddRequest(request):
            engine.add_request(request)
        case wire.AbortRequests(request_ids):
            engine.abort_requests(request_ids)
            if not engine.has_unfinished_requests():  # then no step tells the load
                link.send(wire.EngineCoreOutputs([], engine.stats()))
        case wire.UtilityCall(call_id, "reset_prefix_cache", []):
            engine.reset_prefix_cache()
            link.send(wire.UtilityResult(call_id))
        case wire.UtilityCall(call_id, method):
            error = f"the engine has no function {method!r} with these arguments"
            link.send(wire.UtilityResult(call_id, error=error))
        case _:
            raise wire.WireError(f"unexpected {type(message).__name__}")


def _build_engine(config: EngineConfig) -> Engine:
    from octavo_core.engine_core import EngineCore
    from octavo_core.model_spec import read_model_spec
    from octavo_core.pooler_spec import read_pooler_spec
    from octavo_server.grammar_compilers import make_grammar_compiler
    from octavo_worker.executors import create_executor

    spec = read_model_spec(config.model_path)
    pooler = read_pooler_spec(config, spec)
    grammars = None if pooler is not None else make_grammar_compiler(config.model_path, spec)
    return EngineCore(config, spec, create_executor(config, spec), grammars, pooler)


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class EngineProcess:
    """A spawned engine process and the private directory that its socket lies in.

    Args:
        log_level: Least severe line that the engine logs.
        target: What the process runs.

    Attributes:
        address: ZMQ address for the front to bind.
        process: The process, started.
    """

    def __init__(self, log_level: str, target: EngineTarget) -> None:
        self._directory = _make_private_directory()
        self.address = f"ipc://{self._directory / 'engine.sock'}"
        # Spawn, never fork: a fork would copy the front's threads' locks and its socket.
        self.process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=target, args=(self.address, log_level), name="octavo-engine"
        )
        start_without_interrupts(self.process)

    @property
    def was_killed(self) -> bool:
        """True once the process has ended of a signal, and so without a last word."""
        self.process.join(0.1)
        code = self.process.exitcode
        return code is not None and code < 0

    def describe_end(self) -> str:
        """Say in words how the process ended."""
        self.process.join(1.0)
        code = self.process.exitcode
        if code is None:
            return "the engine process does not answer"
        if code == -signal.SIGKILL:
            return "the engine process was killed (signal 9; the machine may be out of memory)"
        if code < 0:
            return f"the engine process ended with signal {-code}"
        return f"the engine process ended with exit code {code}"

    def end(self, grace: float) -> None:
        """Wait `grace` seconds for the process to end by itself, kill it, and clean up.

        Safe to call twice.
        """
        if self.process.is_alive():
            self.process.join(grace)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        shutil.rmtree(self._directory, ignore_errors=True)


class EngineSpawner:
    """Starts engine processes, one after the other, and ends the last one.

    Args:
        log_level: Least severe line that the engines log.
        target: What their processes run.
    """

    def __init__(self, log_level: str, target: EngineTarget) -> None:
        self._log_level = log_level
        self._target = target
        self._last: EngineProcess | None = None

    def spawn(self) -> EngineProcess:
        """Start an engine process. The one before has ended."""
        self._last = EngineProcess(self._log_level, self._target)
        return self._last

    def kill(self) -> None:
        """Kill the last process; somebody else waits for it and cleans up."""
        if self._last is not None:
            self._last.process.kill()

    def end(self) -> None:
        """Kill the last process, if it is still there, and clean up."""
        if self._last is not None:
            self._last.end(grace=0.0)


def _make_private_directory() -> Path:
    """Make a directory for a Unix socket that no other user can enter."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_SOCKET_DIRECTORY - len("/octavo-12345678"):
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="octavo-", dir=parent))
