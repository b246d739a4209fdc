"""The main function of a worker process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import zmq
from setproctitle import setproctitle

from octavo_core.config import EngineConfig
from octavo_core.process import BEATS_PER_TIMEOUT, exit_with_parent, start_heartbeat
from octavo_worker.executors import messages
from octavo_worker.executors.command_handler import CommandHandler


def run_worker(
    rank: int,
    commands_address: str,
    replies_address: str,
    config: bytes,
    spec: bytes,
    rendezvous: str = "",
) -> None:
    """Carry out commands until told to stop, or until the parent is gone.

    Args:
        rank: Index among the workers.
        commands_address: ZMQ address to take commands from; bound here.
        replies_address: ZMQ address to send replies to; bound by the parent.
        config: An `EngineConfig` in msgpack.
        spec: A `ModelSpec` in msgpack.
        rendezvous: File by which several workers find each other.
    """
    setproctitle(f"octavo: worker {rank}")
    exit_with_parent(Path(commands_address.removeprefix("ipc://")).parent)
    with zmq.Context() as context:
        commands, replies = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        # Last replies may be waited for, but not beyond the parent's own patience.
        commands.linger, replies.linger = 0, 1000
        commands.bind(commands_address)
        replies.connect(replies_address)
        # A socket belongs to one thread, and beats come from one of their own.
        beats = context.socket(zmq.PUSH)
        beats.linger, beats.sndhwm = 0, BEATS_PER_TIMEOUT
        beats.connect(replies_address)
        decoded = msgspec.msgpack.decode(config, type=EngineConfig)
        heart = start_heartbeat(decoded.parallel.heartbeat_timeout, lambda: _beat(beats))

        def send(reply: messages.Reply) -> None:
            replies.send(messages.encode(reply))

        try:
            handler = CommandHandler(rank, decoded, spec, rendezvous, send)
            while True:
                command = messages.decode_command(commands.recv())
                if isinstance(command, messages.Stop):
                    break
                reply = handler.handle(command)
                if reply is not None:
                    send(reply)
            handler.close()
        finally:
            heart.set()
            beats.close()
            commands.close()
            replies.close()


def _beat(beats: zmq.Socket[bytes]) -> None:
    # Full, or closed in the meantime: nobody waits for this one.
    with contextlib.suppress(zmq.ZMQError):
        beats.send(messages.encode(messages.Heartbeat()), zmq.NOBLOCK)
