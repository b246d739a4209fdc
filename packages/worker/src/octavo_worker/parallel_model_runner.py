"""Runs one worker's part of a model over the persistent batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_worker.model_runner import ComputedStep, ModelRunner
from octavo_worker.parallel_model import ParallelModel
from octavo_worker.parallel_state import ParallelPlace


class _Promise(NamedTuple):
    """Tokens that a later stage samples.

    Attributes:
        slots: ``[num_rows]``.
        positions: ``[num_rows]``, where in their slots they belong.
        tenancies: ``[num_rows]``, who had the slots then.
        rows: ``[num_rows]``, which of the step's they are.
    """

    step_id: int
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    tenancies: NDArray[np.int64]
    rows: NDArray[np.int64]


class ParallelModelRunner(ModelRunner):
    """A model runner that keeps its batch in step with those of the other workers.

    Workers of the last stage all have the same logits, and choose the same tokens. Stages
    before it know at once for which slots there will be one, and are told which before it is
    needed.

    Args:
        model: This worker's part.
        place: Of the worker.
        options: Of `ModelRunner`.
    """

    def __init__(self, model: ParallelModel, place: ParallelPlace, **options: Any) -> None:
        super().__init__(model, **options)
        self._stage = model
        self.samples = place.is_last_stage
        self._tenancy = np.zeros(len(self.batch.num_tokens), np.int64)
        self._promises: deque[_Promise] = deque()

    def learn(self, outputs: Sequence[ModelRunnerOutput]) -> None:
        """Take in what the last stage has sampled, step by step."""
        for output in outputs:
            # Steps that failed have no output.
            while self._promises and self._promises[0].step_id < output.step_id:
                self._promises.popleft()
            if self._promises and self._promises[0].step_id == output.step_id:
                self._keep(self._promises.popleft(), output)

    def _keep(self, promise: _Promise, output: ModelRunnerOutput) -> None:
        # A slot may be another request's by now.
        mine = self._tenancy[promise.slots] == promise.tenancies
        token_ids = np.array(output.sampled_token_ids, np.int64)[promise.rows]
        self.batch.token_ids[promise.slots[mine], promise.positions[mine]] = token_ids[mine]

    def _execute(self, scheduler_output: SchedulerOutput) -> ComputedStep | ModelRunnerOutput:
        self._tenancy[scheduler_output.freed_slots] += 1
        self._stage.begin_step(scheduler_output.total_num_scheduled_tokens)
        try:
            return super()._execute(scheduler_output)
        except Exception:
            self._stage.fail_step()
            raise

    def _sample(self, step: ComputedStep, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        if self.samples:
            return super()._sample(step, grammar)
        positions = self.batch.num_tokens[step.slots]
        self.batch.append_tokens(step.slots, np.zeros(len(step.slots), np.int64))
        tenancies = self._tenancy[step.slots]
        promise = _Promise(step.step_id, step.slots, positions, tenancies, step.rows)
        self._promises.append(promise)
        return ModelRunnerOutput(step.step_id, [])
