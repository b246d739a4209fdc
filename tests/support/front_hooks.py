"""Fronts with one protection switched off, or one part broken, for tests of what it protects.

Each function changes the process that it is called in and returns what the engine process runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo_core.wire import EngineCoreOutput
from octavo_server.engine_process import EngineTarget
from octavo_server.request_ledger import RequestLedger
from support.scripted_engine import run_scripted_engine


def forgetful_front() -> EngineTarget:
    """A front that does not keep the tokens of requests in flight."""

    def note(self: Any, outputs: Sequence[EngineCoreOutput]) -> None:
        self.remove([output.request_id for output in outputs if output.finish_reason])

    RequestLedger.note = note  # type: ignore[method-assign]
    return run_scripted_engine
