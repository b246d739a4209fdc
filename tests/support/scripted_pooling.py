"""An engine process that pools without a model: the real loop, scheduler and wire.

A text's vector counts its letters ``a`` to ``h``, so that what comes out is known. The classes are
the letters too. Words misbehave as in `support.scripted_engine`; ``nan`` makes a number that is
none.
"""

from __future__ import annotations

import math
import os
import struct
import sys
import time
from pathlib import Path

import setproctitle

from octavo_core.config import EngineConfig
from octavo_core.engine_core import EngineCore
from octavo_core.model_spec import read_model_spec
from octavo_core.pooler_spec import read_pooler_spec
from octavo_core.pooling_params import PooledOutput, PoolingParams
from octavo_core.process import exit_with_parent
from octavo_core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo_server.engine_process import Engine, FrontLink, serve_engine
from octavo_server.logging_setup import configure_logging
from support.scripted_engine import EXIT_CODE, ScriptedExecutor

LETTERS = "abcdefgh"

EMBEDDER = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu"}
"""Changes to the byte model's config.json."""

CROSS_ENCODER = {
    **EMBEDDER,
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "fits"},
}
CLASSIFIER = {**CROSS_ENCODER, "id2label": dict(enumerate(LETTERS))}


def run_scripted_pooling(address: str, log_level: str) -> None:
    """Take the place of `octavo_server.engine_process.run_engine`."""
    exit_with_parent(Path(address.removeprefix("ipc://")).parent)
    setproctitle.setproctitle("octavo: engine")
    configure_logging(log_level, "engine")
    sys.exit(serve_engine(FrontLink(address), _build, preload="json"))


def vector_of(text: str) -> list[float]:
    """What the engine makes of a text, before it is brought to a length of one."""
    return [float(text.count(letter)) for letter in LETTERS]


def normalized(vector: list[float]) -> list[float]:
    length = math.hypot(*vector) or 1.0
    return [number / length for number in vector]


def _build(config: EngineConfig) -> Engine:
    spec = read_model_spec(config.model_path)
    pooler = read_pooler_spec(config, spec)
    return EngineCore(config, spec, ScriptedPooler(), None, pooler)


class ScriptedPooler(ScriptedExecutor):
    """Counts letters."""

    def __init__(self) -> None:
        super().__init__()
        self._params: dict[int, PoolingParams] = {}

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request in step.new_requests:
            assert request.pooling_params is not None
            self._prompts[request.slot] = request.token_ids
            self._params[request.slot] = request.pooling_params
        texts = [self._text(slot).decode() for slot in step.slots]
        for text in texts:
            self._misbehave_on(text)
        pooled = {
            row: _pool(texts[row], self._params[slot], len(self._prompts[slot]))
            for row, slot in enumerate(step.slots)
        }
        return ModelRunnerOutput(step.step_id, [-1] * len(step.slots), pooled=pooled)

    def _misbehave_on(self, text: str) -> None:
        if "slow" in text:
            time.sleep(0.3)
        if "die" in text:
            os._exit(EXIT_CODE)
        if "break" in text:
            raise RuntimeError("the text asked for it")


def _pool(text: str, params: PoolingParams, num_tokens: int) -> PooledOutput:
    vector = vector_of(text)
    if "nan" in text:
        vector[0] = math.nan
    if params.is_per_token:
        rows = [float(row) for row in range(num_tokens) for _ in range(2)]
        return PooledOutput([num_tokens, 2], struct.pack(f"<{len(rows)}f", *rows))
    if params.task == "embed":
        vector = vector[: params.dimensions]
        if params.use_activation is not False:
            vector = normalized(vector)
    if params.second_segment:
        # A pair fits as well as the second text's share of the letter a.
        vector = [vector[0] / num_tokens]
    return PooledOutput([len(vector)], struct.pack(f"<{len(vector)}f", *vector))
