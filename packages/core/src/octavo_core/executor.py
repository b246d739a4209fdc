"""The one interface between the engine and whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput

ProgressCallback = Callable[[str, float | None], None]
"""Called with a start-up stage in words and its progress from 0 to 1, or None."""


class Executor(Protocol):
    """Runs the workers of one engine.

    Calls come in this order: `load_model`, `determine_available_memory`,
    `initialize_kv_cache`, `warm_up`, then pairs of `execute_model` and
    `sample_tokens`, and `shutdown` at any time.
    """

    @property
    def device(self) -> str:
        """Where the model runs, for example ``cpu`` or ``cuda:0``."""
        ...

    @property
    def dtype(self) -> str:
        """Type of the activations, for example ``float32``."""
        ...

    @property
    def kv_cache_dtype(self) -> str:
        """Type of K and V in the cache, likewise."""
        ...

    @property
    def device_memory(self) -> int | None:
        """Bytes of each worker's device; None where the model lives in host memory."""
        ...

    @property
    def max_concurrent_steps(self) -> int:
        """Steps worth having in flight: more than 1 if scheduling can overlap computing."""
        ...

    def load_model(self, on_progress: ProgressCallback) -> None:
        """Initialize the devices and load the weights.

        Raises:
            ModelError: A file or tensor is missing, damaged or not supported.
        """
        ...

    def determine_available_memory(self) -> int:
        """Return the bytes that each worker has left for the KV cache (the smallest)."""
        ...

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache, and the host tier that its blocks are swapped out to."""
        ...

    def warm_up(self, on_progress: ProgressCallback) -> None:
        """Do once what would make the first requests slow, such as compiling kernels."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start the forward pass of one step. Does not wait for it, nor raise its errors."""
        ...

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Sample from the oldest step not yet sampled; the future also carries its errors.

        Steps are carried out in order. After an error the engine takes back all steps in
        flight, tells every slot as freed and sends its requests anew.
        """
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone."""
        ...

    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""
        ...
