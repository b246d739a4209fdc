"""An executor that runs its worker in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec
import zmq

from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError
from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_core.process import HeartbeatMonitor, start_without_interrupts
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_worker.executors import messages
from octavo_worker.executors.worker_process import run_worker

logger = logging.getLogger(__name__)

# Seconds that a worker gets to end by itself, and then after SIGTERM.
STOP_TIMEOUT = 2.0
TERMINATE_TIMEOUT = 1.0

_FinalReply = messages.Loaded | messages.Done | messages.Sampled


@dataclass(frozen=True)
class _Call:
    """A command that waits for its reply.

    Attributes:
        future: Gets the reply.
        progress: What is reported before it, and None at the end.
    """

    future: Future[_FinalReply] = field(default_factory=Future)
    progress: SimpleQueue[messages.Progress | None] = field(default_factory=SimpleQueue)


class MultiprocExecutor:
    """Spawns one worker, and speaks to it over two sockets in a directory only we can enter.

    Commands are sent by the caller's thread. A thread of ours waits for replies and for
    the end of the process, whichever comes.

    Args:
        config: The engine's configuration.
        spec: The model's hyper-parameters.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._loaded = messages.Loaded(device="", dtype="", kv_cache_dtype="")
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._death: str | None = None
        self._heartbeat_timeout = config.parallel.heartbeat_timeout
        self._is_serving = False  # importing and loading may hold the interpreter for long
        # Mode 0700. Removed at the latest when this process ends, should nobody shut us down.
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-", ignore_cleanup_errors=True)
        self._context = zmq.Context()
        commands_address = f"ipc://{self._folder.name}/commands"
        replies_address = f"ipc://{self._folder.name}/replies"
        # We connect where we send: a connecting socket queues for a peer that is not there
        # yet, where a bound one would block.
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.sndhwm = 0
        self._commands.linger = 0
        self._commands.connect(commands_address)
        replies = self._context.socket(zmq.PULL)
        replies.linger = 0
        replies.bind(replies_address)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(
            target=run_worker,
            name="octavo-worker-0",
            # Ended, not waited for, if the engine exits without shutdown().
            daemon=True,
            args=(
                0,
                commands_address,
                replies_address,
                msgspec.msgpack.encode(config),
                msgspec.msgpack.encode(spec),
            ),
        )
        start_without_interrupts(self._process)
        self._reader = threading.Thread(
            target=self._read_replies, args=(replies,), name="octavo-worker-replies", daemon=True
        )
        self._reader.start()

    @property
    def device(self) -> str:
        """Where the model runs; empty before `load_model`."""
        return self._loaded.device

    @property
    def dtype(self) -> str:
        """Type of the activations; empty before `load_model`."""
        return self._loaded.dtype

    @property
    def kv_cache_dtype(self) -> str:
        """Type of K and V; empty before `load_model`."""
        return self._loaded.kv_cache_dtype

    @property
    def device_memory(self) -> int | None:
        """Bytes of the device; None on a CPU and before `load_model`."""
        return self._loaded.device_memory

    @property
    def max_concurrent_steps(self) -> int:
        """Two: the next step is scheduled while the worker computes."""
        return 2

    def load_model(self, on_progress: ProgressCallback) -> None:
        """Initialize the device and load the weights."""
        reply = self._call(messages.LoadModel(), on_progress)
        assert isinstance(reply, messages.Loaded)
        self._loaded = reply

    def determine_available_memory(self) -> int:
        """Return the bytes left for the KV cache."""
        reply = self._call(messages.DetermineAvailableMemory())
        assert isinstance(reply, messages.Done)
        assert reply.value is not None
        return reply.value

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache and the host tier."""
        self._call(messages.InitializeKVCache(num_blocks, num_host_blocks))

    def warm_up(self, on_progress: ProgressCallback) -> None:
        """Compile what is not compiled yet, and run each kind of work once."""
        self._call(messages.WarmUp(), on_progress)
        self._is_serving = True

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start the forward pass of one step."""
        self._send(messages.Execute(scheduler_output))

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Sample from the oldest step not yet sampled."""
        output: Future[ModelRunnerOutput] = Future()

        def pass_on(reply: Future[_FinalReply]) -> None:
            error = reply.exception()
            if error is not None:
                output.set_exception(error)
                return
            sampled = reply.result()
            assert isinstance(sampled, messages.Sampled)
            output.set_result(sampled.output)

        self._start(messages.Sample(grammar)).future.add_done_callback(pass_on)
        return output

    def check_health(self) -> None:
        """Raise EngineDeadError if the worker is gone."""
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)

    def shutdown(self) -> None:
        """End the worker, by force if it does not hear. Safe to call twice."""
        if self._commands.closed:
            return
        self._send(messages.Stop())
        # The reader ends when the process does.
        self._reader.join(STOP_TIMEOUT)
        if self._reader.is_alive():
            self._process.terminate()
            self._reader.join(TERMINATE_TIMEOUT)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()
        self._commands.close()
        self._context.term()
        self._folder.cleanup()

    def _call(
        self, command: messages.Command, on_progress: ProgressCallback | None = None
    ) -> _FinalReply:
        """Send a command and wait for its reply; progress is reported in this thread."""
        call = self._start(command)
        for report in iter(call.progress.get, None):
            if on_progress is not None:
                on_progress(report.stage, report.progress)
        return call.future.result()

    def _start(self, command: messages.Command) -> _Call:
        call = _Call()
        with self._lock:
            if self._death is None:
                self._calls.append(call)
            death = self._death
        if death is not None:
            _fail(call, EngineDeadError(death))
        else:
            self._send(command)
        return call

    def _send(self, command: messages.Command) -> None:
        if self._commands.closed:
            raise EngineDeadError("the executor has been shut down")
        self._commands.send(messages.encode(command))

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
            logger.exception("a reply of worker 0 can't be read; ending it")
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
            call.progress.put(reply)
        elif isinstance(reply, messages.Failure):
            _fail(call, messages.error_of(reply))
        else:
            call.future.set_result(reply)
            call.progress.put(None)

    def _declare_dead(self, why: str) -> None:
        exit_code = self._process.exitcode
        how = f"exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            how = f"signal {signal.Signals(-exit_code).name}"
        with self._lock:
            self._death = f"worker 0 (process {self._process.pid}) has ended with {how}{why}"
            calls, self._calls = list(self._calls), deque()
        for call in calls:
            _fail(call, EngineDeadError(self._death))


def _fail(call: _Call, error: Exception) -> None:
    call.future.set_exception(error)
    call.progress.put(None)
