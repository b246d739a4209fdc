"""Means and percentiles of any number of values, in bounded memory."""

from __future__ import annotations

import math

# Values that are kept as they are; beyond that they are rounded. A dictionary of 100,000
# floats takes 10 MB.
MAX_EXACT_VALUES = 100_000

# Rounded values are off by this share at most.
RELATIVE_ERROR = 0.001


class QuantileSketch:
    """Counts values; exact while they are few, within 0.1 % after that.

    The rounding is that of DDSketch (Masson, Rim and Lee, arXiv 1908.10693): bins whose
    limits grow geometrically, so that the relative error is the same everywhere.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._counts: dict[float, int] = {}
        self._is_exact = True
        self._log_gamma = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))

    @property
    def mean(self) -> float:
        """Mean of all values, exact; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times. It is not negative."""
        self.count += count
        self.total += value * count
        if value > self.max:
            self.max = value
        if not self._is_exact:
            value = self._rounded(value)
        counts = self._counts
        counts[value] = counts.get(value, 0) + count
        if self._is_exact and len(counts) > MAX_EXACT_VALUES:
            self._round_all()

    def quantile(self, share: float) -> float:
        """Return the smallest value that is not under `share` of all; 0 if there are none."""
        wanted = share * self.count
        seen = 0
        for value, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return min(value, self.max)
        return 0.0

    def cumulative(self) -> list[tuple[float, float]]:
        """Return pairs of a value and the share of values that are not above it."""
        pairs, seen = [], 0
        for value, count in sorted(self._counts.items()):
            seen += count
            pairs.append((value, seen / self.count))
        return pairs

    def _rounded(self, value: float) -> float:
        if value <= 0:
            return 0.0
        index = math.ceil(math.log(value) / self._log_gamma)
        return math.exp(index * self._log_gamma) * (1 - RELATIVE_ERROR)

    def _round_all(self) -> None:
        self._is_exact = False
        exact, self._counts = self._counts, {}
        for value, count in exact.items():
            rounded = self._rounded(value)
            self._counts[rounded] = self._counts.get(rounded, 0) + count
