"""Measures real steps of an engine, for the simulator's cost model.

Runs the engine in this process, so only commands that compute import it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple, TypeVar

from octavo_core.config import EngineConfig
from octavo_core.engine_core import EngineCore
from octavo_core.model_spec import ModelSpec, read_model_spec
from octavo_core.sampling_params import SamplingParams
from octavo_core.simulator.calibration import Observation, fit_cost_model
from octavo_core.simulator.cost_model import CostModel
from octavo_core.simulator.step_recorder import RecordingExecutor
from octavo_core.wire import EngineCoreRequest, Ready
from octavo_server.model_source import resolve_model
from octavo_worker.executors import create_executor

_Item = TypeVar("_Item")

# One odd round can't decide, since equal steps count with their median.
NUM_ROUNDS = 3

DECODE_STEPS = 6

# (requests, tokens of context)
_DECODE_BATCHES = ((1, 16), (1, 512), (2, 64), (4, 64), (8, 64), (4, 256), (16, 64), (32, 32))
_LARGE_DECODE_BATCHES = ((32, 512), (64, 256), (128, 256), (256, 128))
_PROMPTS = (8, 32, 128, 512, 1000)
_LARGE_PROMPTS = (2000, 4000, 8000)
# (requests that decode, their context, tokens of a prompt beside them)
_MIXES = ((4, 64, 48), (8, 64, 200), (16, 64, 100))


class CalibrationRun(NamedTuple):
    """A started engine that a `Calibrator` and others can drive."""

    engine: EngineCore
    executor: RecordingExecutor
    spec: ModelSpec
    ready: Ready


def start_engine(config: EngineConfig) -> CalibrationRun:
    """Start an engine in this process whose steps are recorded.

    Raises:
        ConfigError: A setting does not fit the model or the memory.
        ModelError: The model can't be found, read or served.
    """
    resolved = resolve_model(config.model.model, config.model.revision)
    config = config.replace("the model's location", model_path=str(resolved.path))
    # Steps that overlap have no time of their own.
    config = config.replace("calibration", batch_queue_size=1)
    spec = read_model_spec(resolved.path)
    executor = RecordingExecutor(create_executor(config, spec))
    engine = EngineCore(config, spec, executor)
    try:
        ready = engine.start(lambda stage, progress: None)
    except BaseException:
        engine.shutdown()
        raise
    return CalibrationRun(engine, executor, spec, ready)


class Calibrator:
    """Runs a designed set of steps: decoding at several sizes, prompts, and both at once.

    Args:
        run: The engine, which has nothing else to do meanwhile.
        on_progress: Called with what is measured next, in words.
        clock: Seconds; another one than the wall's on a machine that others use too.
    """

    def __init__(
        self,
        run: CalibrationRun,
        on_progress: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.observations: list[Observation] = []
        self._run = run
        self._on_progress = on_progress
        self._clock = clock
        self._ids = count()
        self._round = 0
        self._is_warm = False

    def measure_round(self) -> None:
        """Measure every kind of step once. Repeat it for medians."""
        if not self._is_warm:
            self._warm_up()
        for num_requests, context in self._decode_batches():
            self._on_progress(f"decoding {num_requests} requests of {context} tokens")
            # The same prompts in every round: later ones find them in the prefix cache.
            for index in range(num_requests):
                self._add(f"{num_requests}.{context}.{index}", context, DECODE_STEPS + 1)
            self._drain()
        for length in self._prompt_lengths():
            self._on_progress(f"a prompt of {length} tokens")
            self._add(f"prompt.{self._round}", length, 1)
            self._drain()
        for num_requests, context, length in self._mixes():
            self._on_progress(f"a prompt of {length} tokens beside {num_requests} requests")
            for index in range(num_requests):
                self._add(f"{num_requests}.{context}.{index}", context, DECODE_STEPS + 1)
            for _ in range(DECODE_STEPS // 2):
                self._step()
            self._add(f"mixed.{self._round}", length, 1)
            self._drain()
        self._round += 1

    def fit(self) -> CostModel:
        """Fit the cost model to all rounds so far."""
        ready, spec = self._run.ready, self._run.spec
        source = f"{spec.architecture} in {ready.dtype} on {ready.device}, measured"
        return fit_cost_model(self.observations, source)

    def _warm_up(self) -> None:
        """Run the first steps of each size, which allocate and choose kernels, unmeasured."""
        for length in (1, 64, 256):
            self._add(f"warm.{length}", min(length, self._room()), 3)
            self._drain()
        self.observations.clear()
        self._is_warm = True

    def _decode_batches(self) -> Iterator[tuple[int, int]]:
        scheduler = self._run.engine.config.scheduler
        for num_requests, context in _DECODE_BATCHES + self._if_fast(_LARGE_DECODE_BATCHES):
            tokens = num_requests * (context + DECODE_STEPS + 2)
            fits = num_requests <= scheduler.max_num_seqs and context <= self._room()
            if fits and tokens <= self._run.ready.kv_cache_tokens // 2:
                yield num_requests, context

    def _prompt_lengths(self) -> Iterator[int]:
        for length in _PROMPTS + self._if_fast(_LARGE_PROMPTS):
            if length <= min(self._room(), self._run.ready.kv_cache_tokens // 2):
                yield length

    def _mixes(self) -> Iterator[tuple[int, int, int]]:
        batches = set(self._decode_batches())
        for num_requests, context, length in _MIXES:
            if (num_requests, context) in batches and length <= self._room():
                yield num_requests, context, length

    def _if_fast(self, more: tuple[_Item, ...]) -> tuple[_Item, ...]:
        return () if self._run.ready.device == "cpu" else more

    def _room(self) -> int:
        return self._run.ready.max_model_len - DECODE_STEPS - 2

    def _add(self, name: str, length: int, max_tokens: int) -> None:
        draw = random.Random(name)
        vocab_size = self._run.spec.vocab_size
        self._run.engine.add_request(
            EngineCoreRequest(
                f"calibration-{next(self._ids)}",
                [draw.randrange(vocab_size) for _ in range(length)],
                SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0),
            )
        )

    def _drain(self) -> None:
        while self._run.engine.has_unfinished_requests():
            self._step()

    def _step(self) -> None:
        loads = self._run.executor.loads
        loads.clear()
        start = self._clock()
        self._run.engine.step()
        seconds = self._clock() - start
        if len(loads) == 1:  # more or fewer: steps overlap, and none has a time of its own
            self.observations.append(Observation(loads[0], seconds))


def calibrate(config: EngineConfig, on_progress: Callable[[str], None]) -> CostModel:
    """Start an engine, measure it and fit a cost model. Takes about a minute on a CPU.

    Raises:
        ConfigError: A setting does not fit, or leaves too few kinds of steps to measure.
        ModelError: The model can't be found, read or served.
    """
    on_progress("starting the engine")
    run = start_engine(config)
    try:
        calibrator = Calibrator(run, on_progress)
        for _ in range(NUM_ROUNDS):
            calibrator.measure_round()
        return calibrator.fit()
    finally:
        run.engine.shutdown()
