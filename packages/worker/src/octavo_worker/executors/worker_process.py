"""The main function of a worker process."""

from __future__ import annotations

from pathlib import Path

import zmq
from setproctitle import setproctitle

from octavo_core.process import exit_with_parent
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

        def send(reply: messages.Reply) -> None:
            replies.send(messages.encode(reply))

        try:
            handler = CommandHandler(rank, config, spec, rendezvous, send)
            while True:
                command = messages.decode_command(commands.recv())
                if isinstance(command, messages.Stop):
                    break
                reply = handler.handle(command)
                if reply is not None:
                    send(reply)
            handler.close()
        finally:
            commands.close()
            replies.close()
