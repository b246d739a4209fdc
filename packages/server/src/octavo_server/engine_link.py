"""The front's end of the socket of one engine process, from its Hello to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from octavo_core import wire
from octavo_core.config import EngineConfig, ParallelConfig
from octavo_core.errors import EngineDeadError, OctavoError, error_named
from octavo_core.process import HeartbeatMonitor, StepMonitor
from octavo_server.engine_process import EngineProcess

logger = logging.getLogger(__name__)

# Seconds that a last message of an engine that just ended may still need through the socket.
_LAST_WORD_SECONDS = 0.2
# Seconds of the engine's messages in a row before everything else has its turn. A socket that
# has something to read never waits, so an engine that is quicker than this process would keep
# the loop to itself: clients that left were noticed 3 s later, when all was computed for them.
_READ_SECONDS = 0.01


class EngineLink:
    """Carries messages to and from one engine process, and notices its end, once.

    All methods belong to one event loop.

    Args:
        process: The engine process, already spawned.
        on_message: Gets what the engine says, but for its Hello, heartbeats and last words.
        on_end: Told once, and last of all, why the engine can't be used any more. The process
            may still run.
    """

    def __init__(
        self,
        process: EngineProcess,
        on_message: Callable[[wire.ToFront], None],
        on_end: Callable[[OctavoError], None],
    ) -> None:
        self.process = process
        self._on_message = on_message
        self._on_end = on_end
        self._identity: bytes | None = None
        self._config: EngineConfig | None = None
        self._has_ended = False
        self._is_ready = False
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A ROUTER drops what doesn't fit; the number of requests is bounded elsewhere instead.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.bind(process.address)
        self._monitor: HeartbeatMonitor | None = None
        self._step_monitor: StepMonitor | None = None
        self._tasks = [self._loop.create_task(self._read())]
        self._loop.add_reader(process.process.sentinel, self._on_process_end)

    @property
    def is_ready(self) -> bool:
        """True while the engine takes requests."""
        return self._is_ready and not self._has_ended

    def configure(self, config: EngineConfig) -> None:
        """Give the engine its configuration, now or as soon as it says hello."""
        self._config = config
        self._configure_if_met()

    def send(self, message: wire.ToEngine) -> None:
        """Send a message to the engine, which has said hello."""
        assert self._identity is not None
        # Without a high-water mark a send never waits, so its future is done already.
        self._socket.send_multipart([self._identity, wire.encode(message)])

    async def close(self, grace: float) -> None:
        """Listen no more, give the process `grace` seconds to end by itself, then kill it."""
        self._has_ended = True
        self._loop.remove_reader(self.process.process.sentinel)
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self.process.end, grace)
        self._context.destroy(linger=0)

    def _configure_if_met(self) -> None:
        if self._identity is not None and self._config is not None:
            self.send(wire.Configure(self._config))

    async def _read(self) -> None:
        try:
            turn_ends = time.monotonic() + _READ_SECONDS
            while True:
                if time.monotonic() >= turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + _READ_SECONDS
                identity, frame = await self._socket.recv_multipart()
                self._handle(identity, wire.decode_to_front(frame))
        except Exception as error:
            logger.exception("The link to the engine broke")
            self._end(EngineDeadError(f"the link to the engine broke: {error}"))

    def _handle(self, identity: bytes, message: wire.ToFront) -> None:
        match message:
            case wire.Heartbeat(step):
                self._note_beat(step)
            case wire.Hello():
                self._identity = identity
                self._configure_if_met()
            case wire.Failed(text, kind, field):
                self._end(error_named(kind, text, field, default=EngineDeadError))
            case wire.Ready():
                assert self._config is not None
                self._is_ready = True
                self._watch_over(self._config.parallel)
                self._on_message(message)
            case _:
                self._on_message(message)

    def _watch_over(self, config: ParallelConfig) -> None:
        timeout = config.heartbeat_timeout
        self._monitor = HeartbeatMonitor(timeout)
        self._step_monitor = StepMonitor(config.step_timeout, self._monitor.interval)
        self._tasks.append(self._loop.create_task(self._listen_for_beats(self._monitor, timeout)))

    def _note_beat(self, step: int | None) -> None:
        if self._monitor is None or self._step_monitor is None or self._config is None:
            return
        self._monitor.beat()
        if not self._step_monitor.beat(step):
            timeout = self._config.parallel.step_timeout
            self._end(
                EngineDeadError(
                    f"the engine has been in one step for more than {timeout:g} seconds "
                    f"(--step-timeout)"
                )
            )

    async def _listen_for_beats(self, monitor: HeartbeatMonitor, timeout: float) -> None:
        while monitor.tick():
            await asyncio.sleep(monitor.interval)
        self._end(
            EngineDeadError(f"the engine process has given no sign of life for {timeout:g} seconds")
        )

    def _on_process_end(self) -> None:
        self._loop.remove_reader(self.process.process.sentinel)
        if self.process.was_killed:
            self._end(EngineDeadError(self.process.describe_end()))
        else:
            self._tasks.append(self._loop.create_task(self._await_last_word()))

    async def _await_last_word(self) -> None:
        # The engine may have said why; that message is better than an exit code.
        await asyncio.sleep(_LAST_WORD_SECONDS)
        self._end(EngineDeadError(self.process.describe_end()))

    def _end(self, error: OctavoError) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_end(error)
