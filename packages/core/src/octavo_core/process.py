"""Manners of a child process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing.connection import wait
from pathlib import Path


def exit_with_parent(folder: Path | None = None) -> None:
    """End this process at once when the process that spawned it is gone, however it died.

    Starts a daemon thread that waits on the parent's sentinel. Does nothing in a
    process that multiprocessing did not start.

    Args:
        folder: Private folder of the parent for both, which it can't remove any more.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def ignore_terminal_interrupt() -> None:
    """Ignore SIGINT, which a terminal sends to the whole group: the parent decides when to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
