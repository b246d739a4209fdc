"""One log format for all processes, on standard error."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str, process: str) -> None:
    """Send log lines of `level` and above to standard error.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        process: Short name of this process, shown in each line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(levelname).1s %(asctime)s {process}: %(message)s", datefmt="%m-%d %H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("octavo_core", "octavo_worker", "octavo_kernels", "octavo_server"):
        logging.getLogger(name).setLevel(level.upper())
