"""A line that fills while weights are read."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from octavo_core.executor import ProgressCallback

logger = logging.getLogger(__name__)

_WIDTH = 40  # characters of the bar
_LOG_INTERVAL = 10.0  # seconds between two lines of a log, where there is no terminal


class ProgressBar:
    """Draws progress on a terminal, logs it now and then elsewhere, and passes it on.

    Args:
        on_progress: Who is to be told as well.
        stream: Where the bar is drawn if it is a terminal; by default standard error.
    """

    def __init__(self, on_progress: ProgressCallback, stream: TextIO | None = None) -> None:
        self._on_progress = on_progress
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._shown = -1  # percent
        self._logged_at = time.monotonic()

    def __call__(self, stage: str, progress: float | None) -> None:
        """Take a stage, and which share of it is done."""
        self._on_progress(stage, progress)
        if progress is None:
            return
        percent = int(100 * progress)
        if self._is_terminal:
            self._draw(stage, percent)
        elif time.monotonic() - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = time.monotonic()
            logger.info("%s: %d %%", stage, percent)

    def _draw(self, stage: str, percent: int) -> None:
        if percent == self._shown:  # a terminal is slow, and a model has thousands of tensors
            return
        self._shown = percent
        filled = _WIDTH * percent // 100
        bar = "#" * filled + "-" * (_WIDTH - filled)
        end = "\n" if percent == 100 else ""
        print(f"\r{stage} [{bar}] {percent:3d} %", end=end, file=self._stream, flush=True)
