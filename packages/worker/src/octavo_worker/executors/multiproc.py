"""An executor that runs each worker in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import tempfile
import threading
from collections import deque
from concurrent.futures import Future

import msgspec
import zmq

from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError
from octavo_core.model_spec import ModelSpec
from octavo_core.process import HeartbeatMonitor, start_without_interrupts
from octavo_worker.executors import messages
from octavo_worker.executors.call import Call, FinalReply
from octavo_worker.executors.worker_process import run_worker
from octavo_worker.executors.workers import WorkersExecutor

logger = logging.getLogger(__name__)

# Seconds that a worker gets to end by itself, and then after SIGTERM.
STOP_TIMEOUT = 2.0
TERMINATE_TIMEOUT = 1.0


class MultiprocExecutor(WorkersExecutor):
    """Spawns the workers, and speaks to them over sockets in a directory only we can enter.

    Args:
        config: The engine's configuration.
        spec: The model's hyper-parameters.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        # Mode 0700. Removed at the latest when this process ends, should nobody shut us down.
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-", ignore_cleanup_errors=True)
        self._context = zmq.Context()
        encoded = msgspec.msgpack.encode(config), msgspec.msgpack.encode(spec)
        timeout = config.parallel.heartbeat_timeout
        workers = [
            WorkerProcess(rank, self._context, self._folder.name, *encoded, timeout)
            for rank in range(config.parallel.world_size)
        ]
        super().__init__(config, workers)

    def shutdown(self) -> None:
        """End the workers, by force if they do not hear. Safe to call twice."""
        super().shutdown()
        self._context.term()
        self._folder.cleanup()


class WorkerProcess:
    """Spawns one worker, and speaks to it over two sockets.

    Commands are sent by the caller's thread. A thread of ours waits for replies and for
    the end of the process, whichever comes.

    Args:
        rank: Of the worker.
        context: For the sockets.
        folder: Private directory, for the sockets and for what workers find each other by.
        config: An `EngineConfig` in msgpack.
        spec: A `ModelSpec` in msgpack.
        heartbeat_timeout: Seconds without a sign of life after which it counts as dead.
    """

    def __init__(
        self,
        rank: int,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: str,
        config: bytes,
        spec: bytes,
        heartbeat_timeout: float,
    ) -> None:
        self._rank = rank
        self._heartbeat_timeout = heartbeat_timeout
        self._is_serving = False  # importing and loading may hold the interpreter for long
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque()
        self._death: str | None = None
        commands_address = f"ipc://{folder}/commands-{rank}"
        replies_address = f"ipc://{folder}/replies-{rank}"
        # We connect where we send: a connecting socket queues for a peer that is not there
        # yet, where a bound one would block.
        self._commands = context.socket(zmq.PUSH)
        self._commands.sndhwm = 0
        self._commands.linger = 0
        self._commands.connect(commands_address)
        replies = context.socket(zmq.PULL)
        replies.linger = 0
        replies.bind(replies_address)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(
            target=run_worker,
            name=f"octavo-worker-{rank}",
            # Ended, not waited for, if the engine exits without shutdown().
            daemon=True,
            args=(
                rank,
                commands_address,
                replies_address,
                config,
                spec,
                f"{folder}/rendezvous",
            ),
        )
        start_without_interrupts(self._process)
        self._reader = threading.Thread(
            target=self._read_replies,
            args=(replies,),
            name=f"octavo-worker-replies-{rank}",
            daemon=True,
        )
        self._reader.start()

    @property
    def death(self) -> str | None:
        """How the worker ended; None while it lives."""
        with self._lock:
            return self._death

    def start(self, call: Call, command: messages.Command) -> None:
        """Send a command whose reply `call` gets; an error, if the worker is gone."""
        if isinstance(command, messages.WarmUp):
            call.future.add_done_callback(self._begin_to_watch)
        with self._lock:
            if self._death is None:
                self._calls.append(call)
            death = self._death
        if death is not None:
            call.fail(EngineDeadError(death))
        else:
            self.send(messages.encode(command))

    def send(self, command: bytes) -> None:
        """Send an encoded command that is not answered."""
        if self._commands.closed:
            raise EngineDeadError("the executor has been shut down")
        self._commands.send(command)

    def kill(self) -> None:
        """End the worker at once. Any thread may call this."""
        self._process.kill()

    def stop(self) -> None:
        """Ask the worker to end, without waiting. Safe to call twice."""
        if not self._commands.closed:
            self.send(messages.encode(messages.Stop()))

    def end(self) -> None:
        """Wait until the worker is gone; by force if it does not hear. Safe to call twice."""
        if self._commands.closed:
            return
        # The reader ends when the process does.
        self._reader.join(STOP_TIMEOUT)
        if self._reader.is_alive():
            self._process.terminate()
            self._reader.join(TERMINATE_TIMEOUT)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()
        self._commands.close()

    def _begin_to_watch(self, warm: Future[FinalReply]) -> None:
        self._is_serving = True

    def _read_replies(self, replies: zmq.Socket[bytes]) -> None:
        """Hand replies to the calls they answer, until the process ends."""
        poller = zmq.Poller()
        poller.register(replies, zmq.POLLIN)
        poller.register(self._process.sentinel, zmq.POLLIN)
        monitor = HeartbeatMonitor(self._heartbeat_timeout)
        alive = True
        silence = ""
        try:
            while alive:
                ready = dict(poller.poll(int(monitor.interval * 1000)))
                alive = self._process.sentinel not in ready
                # After the end, what it still said is read before it is declared dead.
                while replies.poll(0 if alive else 100):
                    monitor.beat()
                    self._take(messages.decode_reply(replies.recv()))
                if not ready and not monitor.tick() and self._is_serving and not silence:
                    silence = f": it gave no sign of life for {self._heartbeat_timeout:g} seconds"
                    self._process.kill()
        except Exception:
            # Nobody else reads replies, so calls would wait for ever.
            logger.exception("a reply of worker %d can't be read; ending it", self._rank)
            self._process.kill()
        replies.close()
        self._process.join()
        self._declare_dead(silence)

    def _take(self, reply: messages.Reply) -> None:
        if isinstance(reply, messages.Heartbeat):
            return
        with self._lock:
            call = self._calls[0]
            if not isinstance(reply, messages.Progress):
                self._calls.popleft()
        if isinstance(reply, messages.Progress):
            call.report(reply)
        else:
            call.finish(reply)

    def _declare_dead(self, why: str) -> None:
        exit_code = self._process.exitcode
        how = f"exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            how = f"signal {signal.Signals(-exit_code).name}"
        with self._lock:
            self._death = (
                f"worker {self._rank} (process {self._process.pid}) has ended with {how}{why}"
            )
            calls, self._calls = list(self._calls), deque()
        for call in calls:
            call.fail(EngineDeadError(self._death))
