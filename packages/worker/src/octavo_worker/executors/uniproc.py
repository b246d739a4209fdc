"""An executor that runs its one worker inside the engine's process."""

from __future__ import annotations

from concurrent.futures import Future

from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError
from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_worker.worker import Worker


class UniProcExecutor:
    """Computes each step at once, in the caller's thread; futures are done when returned.

    Args:
        config: The engine's configuration.
        spec: The model's hyper-parameters.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._worker: Worker | None = Worker(config, spec)

    @property
    def device(self) -> str:
        """Where the model runs."""
        return str(self._running.device)

    @property
    def dtype(self) -> str:
        """Type of the activations."""
        return str(self._running.dtype).removeprefix("torch.")

    @property
    def kv_cache_dtype(self) -> str:
        """Type of K and V."""
        return str(self._running.kv_cache_dtype).removeprefix("torch.")

    @property
    def device_memory(self) -> int | None:
        """Bytes of the device; None on a CPU."""
        return self._running.device_memory

    @property
    def max_concurrent_steps(self) -> int:
        """One: a step is done when its call returns."""
        return 1

    def load_model(self, on_progress: ProgressCallback) -> None:
        """Initialize the device and load the weights."""
        self._running.init_device()
        self._running.load_model(on_progress)

    def determine_available_memory(self) -> int:
        """Return the bytes left for the KV cache."""
        return self._running.determine_available_memory()

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache and the host tier."""
        self._running.initialize_kv_cache(num_blocks, num_host_blocks)

    def warm_up(self, on_progress: ProgressCallback) -> None:
        """Compile what is not compiled yet, and run each kind of work once."""
        self._running.warm_up(on_progress)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run the forward pass of one step; `sample_tokens` has its errors."""
        self._running.execute_model(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Sample from the oldest step not yet sampled."""
        try:
            return _Done(self._running.sample_tokens(grammar))
        except Exception as error:
            future: Future[ModelRunnerOutput] = Future()
            future.set_exception(error)
            return future

    def check_health(self) -> None:
        """Do nothing: while this process lives, the worker does."""

    def shutdown(self) -> None:
        """Let go of the model and the KV cache."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    @property
    def _running(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("the executor has been shut down")
        return self._worker


class _Done(Future[ModelRunnerOutput]):
    """A future that has its result from the start, and needs no lock: a real one takes 50 us."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Return it."""
        return self._output

    def exception(self, timeout: float | None = None) -> None:
        """Return None."""

    def done(self) -> bool:
        """Return True."""
        return True
