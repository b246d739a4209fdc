"""Manners of a child process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
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


def start_without_interrupts(process: BaseProcess) -> None:
    """Start a child that a terminal's Ctrl-C does not reach.

    A terminal sends SIGINT to the whole group, and a child would print a traceback where its
    parent ends in order. The child inherits the blocked signal, so that it is safe from its
    first instruction on; the parent gets what came in the meantime right after.
    """
    # Starting the tracker, which a first child does, would unblock the signal again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
