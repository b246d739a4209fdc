"""A real engine with faults at chosen stages of chosen requests.

Which ones stands in an environment variable that nothing but this module reads: a JSON object
from a request's seed to the stage that fails for it, for example ``{"666": "forward"}``. Stages
are ``prepare``, ``forward`` and ``sample``; ``oversized`` runs out of memory even alone;
``kernel`` makes each step take three seconds in one kernel, ``interpreter`` in one Python call.
``memory`` runs out of memory in each step of more than so many requests. A grammar that spells
`GRAMMAR_POISON` fails at its third token, always.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from octavo_kernels import quantize_weight, quantized_matmul
from octavo_server.engine_process import run_engine
from octavo_server.llguidance_backend import LLGuidanceBackend
from octavo_worker import model_runner
from octavo_worker.model_runner import ModelRunner

VARIABLE = "OCTAVO_TEST_FAULTS"
SECONDS = 3.0
GRAMMAR_POISON = "belladonna"


class InjectedFault(RuntimeError):
    """What the test asked for."""


def run_faulty_engine(address: str, log_level: str) -> None:
    """Take the place of `octavo_server.engine_process.run_engine`."""
    inject(json.loads(os.environ[VARIABLE]))
    run_engine(address, log_level)


def inject(faults: dict[str, Any]) -> None:
    """Break the model runner of this process, for the requests that `faults` names."""
    stage_of = {int(seed): stage for seed, stage in faults.items() if seed.isdigit()}
    runner: Any = ModelRunner
    prepare, forward, run_one_call = runner.prepare_input, runner.forward, runner.run_one_call
    sample = model_runner.sample_rows

    def check(self: Any, stage: str, slots: Any) -> None:
        for slot in np.asarray(slots).tolist():
            if stage_of.get(int(self.batch.seeds[slot])) == stage:
                raise InjectedFault(stage)

    def check_size(self: Any, slots: Any) -> None:
        if "oversized" in {stage_of.get(int(self.batch.seeds[slot])) for slot in slots}:
            raise torch.OutOfMemoryError("one row is too many")

    def faulty_prepare(self: Any, scheduler_output: Any) -> Any:
        check(self, "prepare", scheduler_output.slots)
        self.slots_of_step = scheduler_output.slots
        return prepare(self, scheduler_output)

    def faulty_forward(self: Any, *args: Any) -> Any:
        slots = getattr(self, "slots_of_step", [])
        check(self, "forward", slots)
        check_size(self, slots)
        hidden = forward(self, *args)
        if len(slots) > faults.get("memory", 1 << 30):
            raise torch.OutOfMemoryError(f"{len(slots)} rows")
        return hidden

    def faulty_sample(logits: Any, batch: Any, slots: Any, *args: Any) -> Any:
        # After the fact, so that half the work was done.
        result = sample(logits, batch, slots, *args)
        end_sampling(batch, slots.tolist())
        return result

    def end_sampling(batch: Any, slots: list[int]) -> None:
        for slot in slots:
            stage = stage_of.get(int(batch.seeds[slot]))
            if stage == "sample":
                raise InjectedFault(stage)
            if stage in ("kernel", "interpreter"):
                call_for(SECONDS, multiply if stage == "kernel" else count)

    def faulty_one_call(self: Any, decoder_step: Any, scheduler_output: Any) -> Any:
        slots = scheduler_output.slots
        check(self, "prepare", slots)
        check(self, "forward", slots)
        check_size(self, slots)
        result = run_one_call(self, decoder_step, scheduler_output)
        if len(slots) > faults.get("memory", 1 << 30):
            raise torch.OutOfMemoryError(f"{len(slots)} rows")
        if not self.batch.needs_logits(slots):
            end_sampling(self.batch, slots)
        return result

    compile_grammar = LLGuidanceBackend.compile

    def faulty_compile(self: Any, params: Any) -> Any:
        grammar = compile_grammar(self, params)
        return _Poisoned(grammar) if GRAMMAR_POISON in str(params.regex) else grammar

    LLGuidanceBackend.compile = faulty_compile  # type: ignore[method-assign]
    runner.prepare_input, runner.forward = faulty_prepare, faulty_forward
    runner.run_one_call = faulty_one_call
    model_runner.sample_rows = faulty_sample  # type: ignore[assignment]


class _Poisoned:
    """A grammar, or a matcher, whose masks fail at the third."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._num_masks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def new_matcher(self) -> Any:
        return _Poisoned(self._inner.new_matcher())

    def bitmask(self) -> bytes:
        self._num_masks += 1
        if self._num_masks == 3:
            raise InjectedFault("grammar")
        mask: bytes = self._inner.bitmask()
        return mask


def call_for(seconds: float, call: Callable[[int], None]) -> None:
    """Call `call` once so that it takes at least so long."""
    rounds, took = 1, 0.0
    # The first call may be a slow one, and a short one tells little.
    while took < 0.1:
        rounds *= 2
        started = time.monotonic()
        call(rounds)
        took = time.monotonic() - started
    call(math.ceil(1.2 * rounds * seconds / took))


def multiply(times: int) -> None:
    """Multiply by packed weights, in one call of a kernel."""
    weight = quantize_weight(torch.ones(512, 512), "q8_0")
    quantized_matmul(torch.ones(512 * times, 512), weight)


def count(times: int) -> None:
    """Add up numbers in one call that never lets go of the interpreter's lock."""
    sum(range(10**7 * times))
