"""The main function of a worker process."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec
import zmq
from setproctitle import setproctitle

from octavo_core.config import EngineConfig
from octavo_core.model_spec import ModelSpec
from octavo_core.process import BEATS_PER_TIMEOUT, exit_with_parent, start_heartbeat
from octavo_worker.executors import messages

logger = logging.getLogger(__name__)


def run_worker(
    rank: int, commands_address: str, replies_address: str, config: bytes, spec: bytes
) -> None:
    """Carry out commands until told to stop, or until the parent is gone.

    Args:
        rank: Index among the workers.
        commands_address: ZMQ address to take commands from; bound here.
        replies_address: ZMQ address to send replies to; bound by the parent.
        config: An `EngineConfig` in msgpack.
        spec: A `ModelSpec` in msgpack.
    """
    setproctitle(f"octavo: worker {rank}")
    exit_with_parent(Path(commands_address.removeprefix("ipc://")).parent)
    with zmq.Context() as context:
        commands, replies = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        # Last replies may be waited for, but not beyond the parent's own patience.
        commands.linger, replies.linger = 0, 1000
        commands.bind(commands_address)
        replies.connect(replies_address)
        decoded = msgspec.msgpack.decode(config, type=EngineConfig)
        # A socket belongs to one thread, and beats come from one of their own.
        beats = context.socket(zmq.PUSH)
        beats.linger, beats.sndhwm = 0, BEATS_PER_TIMEOUT
        beats.connect(replies_address)
        heart = start_heartbeat(decoded.parallel.heartbeat_timeout, lambda: _beat(beats))
        try:
            _WorkerProcess(rank, replies, decoded, spec).serve(commands)
        finally:
            heart.set()
            beats.close()
            commands.close()
            replies.close()


def _beat(beats: zmq.Socket[bytes]) -> None:
    # Full, or closed in the meantime: nobody waits for this one.
    with contextlib.suppress(zmq.ZMQError):
        beats.send(messages.encode(messages.Heartbeat()), zmq.NOBLOCK)


class _WorkerProcess:
    """A worker and the socket that its replies go to."""

    def __init__(
        self, rank: int, replies: zmq.Socket[bytes], config: EngineConfig, spec: bytes
    ) -> None:
        self._rank = rank
        self._replies = replies
        self._config = config
        self._spec = msgspec.msgpack.decode(spec, type=ModelSpec)

    def serve(self, commands: zmq.Socket[bytes]) -> None:
        # Torch is imported here, so that the process has its title and its manners before.
        from octavo_worker.worker import Worker

        self._worker = Worker(self._config, self._spec, self._rank)
        while True:
            command = messages.decode_command(commands.recv())
            if isinstance(command, messages.Stop):
                return
            try:
                reply = self._carry_out(command)
            except Exception as error:
                logger.exception("worker %d: %s failed", self._rank, type(command).__name__)
                reply = messages.failure_of(error)
            if reply is not None:
                self._send(reply)

    def _carry_out(self, command: messages.Command) -> messages.Reply | None:
        worker = self._worker
        match command:
            case messages.Execute(scheduler_output):
                worker.execute_model(scheduler_output)
                return None
            case messages.Sample(grammar):
                return messages.Sampled(worker.sample_tokens(grammar))
            case messages.LoadModel():
                worker.init_device()
                worker.load_model(self._report)
                return messages.Loaded(
                    str(worker.device),
                    str(worker.dtype).removeprefix("torch."),
                    str(worker.kv_cache_dtype).removeprefix("torch."),
                    worker.device_memory,
                )
            case messages.DetermineAvailableMemory():
                return messages.Done(worker.determine_available_memory())
            case messages.InitializeKVCache(num_blocks, num_host_blocks):
                worker.initialize_kv_cache(num_blocks, num_host_blocks)
                return messages.Done()
            case messages.WarmUp():
                worker.warm_up(self._report)
                return messages.Done()
            case messages.Stop():
                raise AssertionError("serve() ends on Stop")

    def _report(self, stage: str, progress: float | None) -> None:
        self._send(messages.Progress(stage, progress))

    def _send(self, reply: messages.Reply) -> None:
        self._replies.send(messages.encode(reply))
