"""Several front processes on one address, before one engine: ``--api-server-count``.

The main process starts them and replaces those that crash. It serves no HTTP itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import setproctitle

from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError, OctavoError
from octavo_core.process import HeartbeatMonitor, cpu_seconds
from octavo_server.engine_handle import EngineHandle
from octavo_server.engine_process import EngineSpawner, EngineTarget, engine_target
from octavo_server.front import (
    EXIT_ENGINE_DEAD,
    announce,
    bind_socket,
    check_settings,
    find_model,
    warn_of_open_door,
)
from octavo_server.front_hub import FrontHub
from octavo_server.front_wire import FrontReady
from octavo_server.keys import make_key_ring
from octavo_server.logging_setup import configure_logging
from octavo_server.sub_front import FrontProcess
from octavo_server.supervisor import CRASH_WINDOW, MAX_CRASHES
from octavo_server.tls import make_ssl_context

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds beyond `shutdown_timeout` after which a front that has not ended is killed.
_END_SECONDS = 6.0
# Seconds that fronts get to tell their clients that the engine is gone, or after a second signal.
_FORCED_SECONDS = 4.0
# Seconds that a last message of a front that just ended may still need through the socket.
_LAST_WORD_SECONDS = 0.2


def run_fronts(config: EngineConfig, target: EngineTarget | None = None) -> int:
    """Serve until a signal, the engine's death for good, or fronts that crash again and again.

    Args:
        config: All settings; the model's path is found here.
        target: What the engine process runs; by default what the executor asks for.

    Returns:
        Exit code: 0 after a signal, 1 if the engine or too many fronts died.

    Raises:
        ConfigError: The address can't be listened on, or a setting is wrong.
        ModelError: The model can't be found or loaded.
        EngineDeadError: The engine or a front died while it started.
    """
    setproctitle.setproctitle("octavo: hub")
    level = config.server.log_level
    configure_logging(level, "hub", json_lines=config.observability.json_logs)
    # Each front makes its own; what is wrong is to be known before any of them starts.
    make_key_ring(config.access)
    make_ssl_context(config.access)
    with contextlib.ExitStack() as stack:
        listeners = bind_sockets(
            config.server.host, config.server.port, config.server.api_server_count
        )
        for listener in listeners:
            stack.enter_context(contextlib.closing(listener))
        check_settings(config)
        warn_of_open_door(config, listeners[0])
        noted: list[int] = []
        for number in _SIGNALS:
            signal.signal(number, lambda number, _frame: noted.append(number))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
        address = f"ipc://{folder / 'hub.sock'}"
        spawners = [
            EngineSpawner(level, target or engine_target(config.parallel.backend))
            for _ in range(config.parallel.data_parallel_size)
        ]
        group = FrontGroup(config, address, listeners, spawners, noted)
        try:
            return asyncio.run(group.run())
        finally:
            group.kill()
            for spawner in spawners:
                spawner.end()


def bind_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Listen on one address with several sockets, among which the kernel deals out connections.

    With one socket that all processes accept from, whoever wakes first takes all that wait.

    Raises:
        ConfigError: The host is unknown, or the port is in use or not allowed.
    """
    # Sockets with SO_REUSEPORT share a port with any other process of this user that asks for it,
    # so whether it is free is found out by one without.
    with contextlib.closing(bind_socket(host, port)) as probe:
        port = probe.getsockname()[1]
    return [bind_socket(host, port, share=True) for _ in range(count)]


async def until_silent(pid: int, monitor: HeartbeatMonitor) -> None:
    """Wait until a process has neither beaten nor computed for a monitor's time-out.

    What computes may only be slow: with bodies of 16 MiB, beats come late.
    """
    computed = cpu_seconds(pid)
    while monitor.tick():
        await asyncio.sleep(monitor.interval)
        before, computed = computed, cpu_seconds(pid)
        if computed != before:
            monitor.beat()


class FrontGroup:
    """One run of a server with several fronts.

    Args:
        config: All settings.
        address: ZMQ address for the hub.
        listeners: One socket for each front.
        spawners: Start the engines.
        noted_signals: Signals that came before there was an event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        listeners: list[socket.socket],
        spawners: list[EngineSpawner],
        noted_signals: list[int],
    ) -> None:
        self._config = config
        self._address = address
        self._listeners = listeners
        self._spawners = spawners
        self._noted_signals = noted_signals
        self._engines = [spawner.spawn() for spawner in spawners]
        self._fronts = [
            FrontProcess(address, index, listener, config)
            for index, listener in enumerate(listeners)
        ]
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        self._num_signals = 0
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = False

    async def run(self) -> int:
        """Serve, and return the exit code."""
        from octavo_server.engine_group import keep_engines

        self._failure: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._all_ready = asyncio.Event()
        self._model_name = ""
        self._handle_signals()
        engine = keep_engines(self._engines, self._spawners, self._config)
        self._engine: EngineHandle = engine
        self._hub = hub = FrontHub(self._address, engine, self._config)
        hub.on_ready, hub.on_failure = self._on_ready, self._on_front_failure
        hub.on_sign_of_life = lambda index: self._fronts[index].monitor.beat()
        for front in self._fronts:
            self._watch(front)
        background = self._start_background()
        try:
            return await self._run()
        finally:
            self._is_ending = True
            for task in background:
                task.cancel()
            closing = asyncio.create_task(engine.close())
            forced = asyncio.create_task(self._force.wait())
            await asyncio.wait({closing, forced}, return_when=asyncio.FIRST_COMPLETED)
            forced.cancel()
            if not closing.done():
                for spawner in self._spawners:
                    spawner.kill()
            await closing
            hub.close()

    def kill(self) -> None:
        """End what is still there of the fronts."""
        for front in self._fronts:
            front.end()

    async def _run(self) -> int:
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            ends: set[asyncio.Future[Any]] = {stopping, self._failure}
            await asyncio.wait({loading, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            else:
                logger.info("Stopped while loading")
        finally:
            loading.cancel()
            stopping.cancel()
        self._is_ending = True
        if self._failure.done():
            code = self._failure.result()  # raises what a front or the engine could not start of
            await self._await_fronts(_FORCED_SECONDS)
            return code
        self._hub.drain()
        await self._await_fronts(self._config.server.shutdown_timeout + _END_SECONDS)
        return 0

    async def _load(self) -> None:
        """Find the model, tell everyone, and wait until all fronts take requests."""
        loop = asyncio.get_running_loop()

        def on_progress(stage: str, progress: float | None) -> None:
            if self._stop.is_set():
                raise InterruptedError("the server is shutting down")
            loop.call_soon_threadsafe(self._engine.report_stage, stage, progress)

        resolved = await find_model(self._config, on_progress)
        self._model_name = self._config.model.served_model_name or resolved.name
        config = self._config.replace("the model that was found", model_path=str(resolved.path))
        self._hub.configure(config, self._model_name)
        await self._engine.wait_ready()
        await self._all_ready.wait()

    def _start_background(self) -> list[asyncio.Task[None]]:
        from octavo_server.stats_log import log_stats

        interval = self._config.observability.log_stats_interval
        return [asyncio.create_task(log_stats(self._hub, interval))] if interval else []

    # Fronts

    def _watch(self, front: FrontProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(front.process.sentinel, self._on_front_end, front)

    def _on_ready(self, index: int, ready: FrontReady) -> None:
        self._fronts[index].is_ready = True
        self._fronts[index].watch = self._start(self._end_if_silent(self._fronts[index]))
        if not self._all_ready.is_set() and all(front.is_ready for front in self._fronts):
            announce(
                self._config,
                self._listeners[0],
                self._model_name,
                ready.example_path,
                ready.example_fields,
            )
            self._all_ready.set()

    def _on_front_failure(self, index: int, error: OctavoError) -> None:
        """A front could not start: what it says is the operator's to mend."""
        if not self._failure.done() and not self._is_ending:
            self._fail(error)

    def _fail(self, error: OctavoError) -> None:
        self._failure.set_exception(error)
        self._failure.exception()  # What ended the start first is told, and maybe not this.

    def _on_front_end(self, front: FrontProcess) -> None:
        asyncio.get_running_loop().remove_reader(front.process.sentinel)
        front.process.join()
        if front.watch is not None:
            front.watch.cancel()
        # It may have said why; that is better than an exit code.
        self._start(self._replace(front))

    async def _end_if_silent(self, front: FrontProcess) -> None:
        """Kill a front that was stopped, or that hangs; it is replaced like one that crashed."""
        assert front.process.pid is not None
        await until_silent(front.process.pid, front.monitor)
        logger.error(
            "front %d has given no sign of life for %g seconds",
            front.index,
            self._config.parallel.heartbeat_timeout,
        )
        front.process.kill()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop holds no task
        task.add_done_callback(self._tasks.discard)
        return task

    async def _replace(self, front: FrontProcess) -> None:
        """Start another front in place of one that has crashed, unless that happens too often."""
        if not front.is_ready:
            await asyncio.sleep(_LAST_WORD_SECONDS)
        words = front.describe_end()
        self._hub.lose_front(front.index)
        if self._is_ending or self._failure.done():
            return
        if front.process.exitcode == EXIT_ENGINE_DEAD and self._hub.is_engine_dead:
            self._failure.set_result(EXIT_ENGINE_DEAD)
            return
        now = time.monotonic()
        self._crashes.append(now)
        if not self._all_ready.is_set():
            self._fail(EngineDeadError(f"{words} while it started"))
        elif len(self._crashes) == MAX_CRASHES and now - self._crashes[0] <= CRASH_WINDOW:
            logger.critical("Exiting: %s, the third within ten minutes", words)
            self._failure.set_result(EXIT_ENGINE_DEAD)
        else:
            logger.error("%s; another one is started", words)
            self._start_another(front.index)

    def _start_another(self, index: int) -> None:
        try:
            front = FrontProcess(self._address, index, self._listeners[index], self._config)
        except OSError as error:
            self._fail(EngineDeadError(f"no other front can be started: {error}"))
            return
        self._fronts[index] = front
        self._watch(front)

    async def _await_fronts(self, timeout: float) -> None:
        """Wait for all fronts to end; those that have not in time are killed by `kill`."""
        deadline = time.monotonic() + timeout
        forced_until = None
        while any(front.process.is_alive() for front in self._fronts):
            now = time.monotonic()
            if self._force.is_set() and forced_until is None:
                self._hub.drain()
                forced_until = now + _FORCED_SECONDS
            if now > deadline or (forced_until is not None and now > forced_until):
                return
            await asyncio.sleep(0.02)

    # Signals

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        for noted in self._noted_signals:
            self._on_signal(noted)

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        logger.info("Got %s", signal.Signals(number).name)
        (self._stop if self._num_signals == 1 else self._force).set()
