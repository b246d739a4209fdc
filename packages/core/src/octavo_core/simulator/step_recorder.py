"""An executor that writes down what each step computed."""

from __future__ import annotations

from concurrent.futures import Future

from octavo_core.executor import Executor, ProgressCallback
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_core.simulator.cost_model import StepLoad, step_load


class RecordingExecutor:
    """Hands every call on to another executor, and keeps the loads of the steps.

    Args:
        executor: What really computes.

    Attributes:
        loads: One entry for each step that was sampled, in order; clear it at will.
    """

    def __init__(self, executor: Executor) -> None:
        self.loads: list[StepLoad] = []
        self._executor = executor
        self._in_flight: list[SchedulerOutput] = []

    @property
    def device(self) -> str:
        """Where the model runs."""
        return self._executor.device

    @property
    def dtype(self) -> str:
        """Type of the activations."""
        return self._executor.dtype

    @property
    def kv_cache_dtype(self) -> str:
        """Type of K and V in the cache."""
        return self._executor.kv_cache_dtype

    @property
    def device_memory(self) -> int | None:
        """Total memory of the device."""
        return self._executor.device_memory

    @property
    def max_concurrent_steps(self) -> int:
        """Steps worth having in flight."""
        return self._executor.max_concurrent_steps

    def load_model(self, on_progress: ProgressCallback) -> None:
        """Load the weights."""
        self._executor.load_model(on_progress)

    def determine_available_memory(self) -> int:
        """Return the bytes left for the KV cache."""
        return self._executor.determine_available_memory()

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache and the host tier."""
        self._executor.initialize_kv_cache(num_blocks, num_host_blocks)

    def warm_up(self, on_progress: ProgressCallback) -> None:
        """Do once what would make the first requests slow."""
        self._executor.warm_up(on_progress)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start a step, and remember it."""
        self._in_flight.append(scheduler_output)
        self._executor.execute_model(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Sample the oldest step; its load is known once the tokens are."""
        step = self._in_flight.pop(0)
        future = self._executor.sample_tokens(grammar)
        future.add_done_callback(lambda done: self._record(step, done))
        return future

    def check_health(self) -> None:
        """Raise if a worker is gone."""
        self._executor.check_health()

    def shutdown(self) -> None:
        """End the workers."""
        self._executor.shutdown()

    def _record(self, step: SchedulerOutput, done: Future[ModelRunnerOutput]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        tokens = done.result().sampled_token_ids
        self.loads.append(step_load(step, sum(token >= 0 for token in tokens)))
