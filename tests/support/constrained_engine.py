"""The scripted engine under real grammars.

Its model repeats the prompt as far as the constraint allows, and says the first allowed byte in
place of what it doesn't.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future

from octavo_core.config import EngineConfig
from octavo_core.engine_core import EngineCore
from octavo_core.model_spec import read_model_spec
from octavo_core.process import exit_with_parent
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_server.engine_process import Engine, FrontLink, serve_engine
from octavo_server.grammar_compilers import make_grammar_compiler
from octavo_server.logging_setup import configure_logging
from support.scripted_engine import ScriptedExecutor


def run_constrained_engine(address: str, log_level: str) -> None:
    """Take the place of `octavo_server.engine_process.run_engine`."""
    exit_with_parent()
    configure_logging(log_level, "engine")
    sys.exit(serve_engine(FrontLink(address), _build, preload="json"))


def _build(config: EngineConfig) -> Engine:
    spec = read_model_spec(config.model_path)
    grammars = make_grammar_compiler(config.model_path, spec)
    return EngineCore(config, spec, ConstrainedExecutor(), grammars)


class ConstrainedExecutor(ScriptedExecutor):
    """Repeats each prompt, as far as it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self._scheduled: SchedulerOutput | None = None
        self._masks: dict[int, int] = {}

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._scheduled = scheduler_output

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        assert self._scheduled is not None
        self._masks = _masks_by_slot(grammar)
        for slot, token_ids in self._scheduled.forced_tokens:
            self._num_known[slot] += len(token_ids)
        super().execute_model(self._scheduled)
        return super().sample_tokens(grammar)

    def _next(self, slot: int, end: int) -> int:
        token_id = super()._next(slot, end)
        mask = self._masks.get(slot)
        if mask is None or token_id < 0 or mask >> token_id & 1:
            return token_id
        return (mask & -mask).bit_length() - 1


def _masks_by_slot(grammar: GrammarOutput | None) -> dict[int, int]:
    if grammar is None:
        return {}
    width = len(grammar.bitmask) // len(grammar.slots)
    return {
        slot: int.from_bytes(grammar.bitmask[index * width : (index + 1) * width], "little")
        for index, slot in enumerate(grammar.slots)
    }
