"""Compiles grammars beside the engine's loop, and keeps those that were used last."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any

from octavo_core.grammar import Grammar, GrammarBackend
from octavo_core.structured_outputs import StructuredOutputsParams

MAX_CACHED_GRAMMARS = 64

# Below whatever else this machine does, the model's own threads first of all.
_NICENESS = 10

Work = Callable[[], Any]
Submit = Callable[[Work], Future[Any]]
"""Starts work, and returns the future that gets its result."""


class GrammarCompiler:
    """Compiles each grammar once. Its methods belong to one thread, the engine's.

    Args:
        backend: What compiles.
        submit: Runs the work; by default a thread that starts with the first grammar.
        max_wait: Seconds that `wait` takes at most: the engine hears nothing meanwhile.
    """

    def __init__(
        self, backend: GrammarBackend, submit: Submit | None = None, max_wait: float = 0.01
    ) -> None:
        self._max_wait = max_wait
        self._is_prepared = False
        self._backend = backend
        self._submit = submit if submit is not None else BackgroundThread().submit
        self._cache: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()

    def prepare(self) -> None:
        """Have the backend get ready, so that the first request need not wait for it."""
        if not self._is_prepared:
            self._is_prepared = True
            self._submit(self._backend.prepare)

    def start(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Return the grammar, or the promise of one; the future also carries the errors."""
        future = self._cache.get(params)
        if future is None or (future.done() and future.exception() is not None):
            self._is_prepared = True
            future = self._submit(lambda: self._backend.compile(params))
            self._cache[params] = future
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(params)
        return future

    def wait(self, futures: Sequence[Future[Grammar]]) -> None:
        """Wait until one of `futures` is done, for a moment; for an engine with nothing to do."""
        wait(futures, self._max_wait, return_when=FIRST_COMPLETED)


class BackgroundThread:
    """One thread of low priority, so that compiling takes no more than a core that is free.

    It is a daemon, for nobody can end a compilation: the process must be able to exit.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Work, Future[Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> Future[Any]:
        """Run `work` after what was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return future

    def _run(self) -> None:
        _lower_priority()
        while True:
            work, future = self._queue.get()
            try:
                future.set_result(work())
            except BaseException as error:  # a panic of native code is no Exception
                future.set_exception(error)


def _lower_priority() -> None:
    # On Linux a thread has a priority of its own, under its id.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
