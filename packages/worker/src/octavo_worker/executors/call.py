"""A command to a worker that waits for its reply."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from octavo_worker.executors import messages

FinalReply = messages.Loaded | messages.Done | messages.Sampled


@dataclass(frozen=True, eq=False)
class Call:
    """A command that waits for its reply.

    Attributes:
        rank: Worker that it was sent to.
        events: What is reported before the reply, and the call itself at the end.
        future: Gets the reply.
    """

    rank: int
    events: SimpleQueue[messages.Progress | Call] = field(default_factory=SimpleQueue)
    future: Future[FinalReply] = field(default_factory=Future)

    def report(self, progress: messages.Progress) -> None:
        """Pass on how far the worker is. All do the same, so the first speaks for all."""
        if self.rank == 0:
            self.events.put(progress)

    def finish(self, reply: messages.Reply) -> None:
        """Take the reply in."""
        if isinstance(reply, messages.Failure):
            self.fail(messages.error_of(reply))
            return
        assert not isinstance(reply, messages.Progress | messages.Heartbeat)
        self.future.set_result(reply)
        self.events.put(self)

    def fail(self, error: Exception) -> None:
        """Say that there will be no reply."""
        self.future.set_exception(error)
        self.events.put(self)


class WorkerHandle(Protocol):
    """One worker, wherever it runs. It carries out commands in order."""

    def start(self, call: Call, command: messages.Command) -> None:
        """Send a command whose reply `call` gets; an error, if the worker is gone."""
        ...

    def send(self, command: bytes) -> None:
        """Send an encoded command that is not answered."""
        ...

    @property
    def death(self) -> str | None:
        """How the worker ended; None while it lives."""
        ...

    def kill(self) -> None:
        """End the worker at once. Any thread may call this."""
        ...

    def stop(self) -> None:
        """Ask the worker to end, without waiting. Safe to call twice."""
        ...

    def end(self) -> None:
        """Wait until the worker is gone; by force if it does not hear. Safe to call twice."""
        ...
