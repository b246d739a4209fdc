"""Starts engines, and decides whether one that has crashed is replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from octavo_server.engine_process import EngineProcess

# So many crashes within so many seconds are no accident; a server that starts over for ever
# looks alive and serves nobody.
MAX_CRASHES = 3
CRASH_WINDOW = 600.0


class Supervisor:
    """Starts the next engine, unless there were too many crashes of late.

    Args:
        spawn: Starts an engine process.
        clock: Seconds that only grow.
        restarts: False makes the first crash the last one.
    """

    def __init__(
        self,
        spawn: Callable[[], EngineProcess],
        clock: Callable[[], float] = time.monotonic,
        *,
        restarts: bool = True,
    ) -> None:
        self.spawn = spawn
        self.num_restarts = 0
        self._clock = clock
        self._restarts = restarts
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)

    def note_crash(self) -> str | None:
        """Take note of a crash.

        Returns:
            Why there is to be no other engine, or None if there is.
        """
        if not self._restarts:
            return "it is not replaced (--no-engine-restart)"
        now = self._clock()
        self._crashes.append(now)
        if len(self._crashes) == MAX_CRASHES and now - self._crashes[0] <= CRASH_WINDOW:
            minutes = round(CRASH_WINDOW / 60)
            return f"the engine has crashed {MAX_CRASHES} times within {minutes} minutes"
        self.num_restarts += 1
        return None
