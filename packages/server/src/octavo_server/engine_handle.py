"""What a front needs of an engine, be it one, several, or those of another process."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import OctavoError


class EngineState(enum.Enum):
    """Where the engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # another one takes over what it had, or is woken up
    ASLEEP = "asleep"  # its process was ended, until it is woken up
    DEAD = "dead"


class EngineHandle(Protocol):
    """An engine that is kept alive. All methods belong to one event loop.

    Attributes:
        on_outputs: Gets what each step brings, and an error for each request that is given up;
            every request that was added ends in one or the other.
    """

    on_outputs: Callable[[list[wire.EngineCoreOutput]], None]

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        ...

    @property
    def stage(self) -> str:
        """What start-up is doing, in words."""
        ...

    @property
    def progress(self) -> float | None:
        """How far that is, from 0 to 1, or None."""
        ...

    @property
    def stats(self) -> wire.SchedulerStats:
        """The engine's load after its last step."""
        ...

    @property
    def limits(self) -> wire.Ready | None:
        """What the engine's start-up found, once it is done."""
        ...

    @property
    def num_restarts(self) -> int:
        """How many engines were started in place of one that had crashed."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Requests that were added and have not ended."""
        ...

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of prompts that have no answer's token yet."""
        ...

    def configure(self, config: EngineConfig) -> None:
        """Give the engine its configuration, now or as soon as it says hello."""
        ...

    def report_stage(self, stage: str, progress: float | None) -> None:
        """Show what the front itself is doing, until the engine has something to tell."""
        ...

    async def wait_ready(self) -> wire.Ready:
        """Wait until the engine can take requests.

        Raises:
            OctavoError: Start-up failed; the class is the one that the engine named.
        """
        ...

    async def wait_dead(self) -> OctavoError:
        """Wait until the engine has ended for good, and return why."""
        ...

    def add(self, requests: Sequence[wire.EngineCoreRequest]) -> None:
        """Start the choices of one API request. While an engine is replaced, they wait for it.

        Raises:
            EngineDeadError: The engine has ended, or has not started.
        """
        ...

    def abort(self, engine_request_ids: Sequence[str]) -> None:
        """End requests whose clients have left. Unknown ids are ignored."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """Call one of the engine's operator functions, between two of its steps.

        Two of them are about its process: ``sleep`` ends it, and ``wake_up`` starts another one
        and returns when that is ready.

        Raises:
            EngineDeadError: The engine is not up.
            RequestFailedError: It refused, or did not answer in time.
        """
        ...

    async def close(self, grace: float = 3.0) -> None:
        """End the engine: ask it, give it `grace` seconds while it is up, then kill it."""
        ...
