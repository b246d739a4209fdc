"""How load moved over the time of a simulation, in a fixed number of intervals."""

from __future__ import annotations

from typing import NamedTuple

MAX_INTERVALS = 400
COLUMNS = 5


class Interval(NamedTuple):
    """Means over one interval of time; `seconds` are the steps' that began in it.

    Attributes:
        start: Seconds since the start of the trace.
        output_tokens_per_second: Of all replicas together.
        num_running: Running requests of a replica that was at work.
        num_waiting: Waiting requests of a replica that was at work.
        kv_cache_usage: Of a replica that was at work, from 0 to 1.
    """

    start: float
    output_tokens_per_second: float
    num_running: float
    num_waiting: float
    kv_cache_usage: float


class Timeline:
    """Sums by interval. When they get too many, neighbours merge and intervals double."""

    def __init__(self) -> None:
        self.interval = 1 / 1024  # seconds; doubling it stays exact
        self._sums: list[list[float]] = []

    def add(
        self, time: float, seconds: float, tokens: int, running: int, waiting: int, usage: float
    ) -> None:
        """Count one step of one replica that began at `time` and took `seconds`."""
        index = int(time / self.interval)
        while index >= MAX_INTERVALS:
            self._merge()
            index = int(time / self.interval)
        sums = self._sums
        while index >= len(sums):
            sums.append([0.0] * COLUMNS)
        row = sums[index]
        row[0] += seconds
        row[1] += tokens
        row[2] += running * seconds
        row[3] += waiting * seconds
        row[4] += usage * seconds

    def intervals(self) -> list[Interval]:
        """Return the means, in order of time."""
        return [
            Interval(
                index * self.interval,
                tokens / self.interval,
                running / (seconds or 1.0),
                waiting / (seconds or 1.0),
                usage / (seconds or 1.0),
            )
            for index, (seconds, tokens, running, waiting, usage) in enumerate(self._sums)
        ]

    def _merge(self) -> None:
        self.interval *= 2
        pairs = self._sums
        if len(pairs) % 2:
            pairs.append([0.0] * COLUMNS)
        self._sums = [
            [first + second for first, second in zip(*pair, strict=True)]
            for pair in zip(pairs[::2], pairs[1::2], strict=True)
        ]
