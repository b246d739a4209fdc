"""An executor over several workers, wherever they run."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import msgspec

from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError
from octavo_core.executor import ProgressCallback
from octavo_core.sampling_params import SEED_BITS
from octavo_core.scheduler_output import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from octavo_worker.executors import messages
from octavo_worker.executors.call import Call, FinalReply, WorkerHandle

logger = logging.getLogger(__name__)

FAILURE_GRACE = 10.0
"""Seconds that the other workers get to end a step in which one failed. An error that all have
comes from all at once; after one that only one has, they would wait for it for ever."""


class WorkersExecutor:
    """Tells every worker of an engine the same, and takes the answer of one.

    Args:
        config: The engine's configuration.
        workers: By rank, started.
    """

    def __init__(self, config: EngineConfig, workers: Sequence[WorkerHandle]) -> None:
        self._loaded = messages.Loaded(device="", dtype="", kv_cache_dtype="")
        self._workers = workers
        self._num_stages = config.parallel.pipeline_parallel_size
        # The first worker of the last stage, whose tokens count.
        self._sampler = len(workers) - config.parallel.tensor_parallel_size
        self._death: str | None = None
        # Outputs that stages before the last have not been told.
        self._untold: deque[ModelRunnerOutput] = deque()

    @property
    def device(self) -> str:
        """Where the first worker runs; empty before `load_model`."""
        return self._loaded.device

    @property
    def dtype(self) -> str:
        """Type of the activations; empty before `load_model`."""
        return self._loaded.dtype

    @property
    def kv_cache_dtype(self) -> str:
        """Type of K and V; empty before `load_model`."""
        return self._loaded.kv_cache_dtype

    @property
    def device_memory(self) -> int | None:
        """Bytes of the first worker's device; None on a CPU and before `load_model`."""
        return self._loaded.device_memory

    @property
    def max_concurrent_steps(self) -> int:
        """One for each stage; at least two: one is scheduled while another is computed."""
        return max(self._num_stages, 2)

    def load_model(self, on_progress: ProgressCallback) -> None:
        """Initialize the devices, connect the workers and load the weights."""
        reply = self._call(messages.LoadModel(), on_progress)[0]
        assert isinstance(reply, messages.Loaded)
        self._loaded = reply

    def determine_available_memory(self) -> int:
        """Return the bytes left for the KV cache on the worker that has the least."""
        found = []
        for reply in self._call(messages.DetermineAvailableMemory()):
            assert isinstance(reply, messages.Done)
            assert reply.value is not None
            found.append(reply.value)
        return min(found)

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache and the host tier."""
        self._call(messages.InitializeKVCache(num_blocks, num_host_blocks))

    def warm_up(self, on_progress: ProgressCallback) -> None:
        """Compile what is not compiled yet, and run each kind of work once."""
        self._call(messages.WarmUp(), on_progress)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start the forward pass of one step on every worker."""
        if len(self._workers) > 1:
            scheduler_output = _with_seeds(scheduler_output)
        outputs = [self._untold.popleft() for _ in range(len(self._untold))]
        plain = messages.encode(messages.Execute(scheduler_output))
        # Whoever samples knows its tokens already.
        informed = messages.encode(messages.Execute(scheduler_output, outputs))
        for rank, worker in enumerate(self._workers):
            worker.send(informed if rank < self._sampler else plain)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Sample from the oldest step not yet sampled."""
        output: Future[ModelRunnerOutput] = Future()
        calls = [Call(rank) for rank in range(len(self._workers))]
        step = _StepReplies(calls, output, self._sampler, self._give_up, self._remember)
        for call in calls:
            call.future.add_done_callback(step.take)
        for call, worker in zip(calls, self._workers, strict=True):
            asked = grammar if call.rank >= self._sampler else None
            worker.start(call, messages.Sample(asked))
        return output

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker is gone."""
        deaths = [self._death, *(worker.death for worker in self._workers)]
        for death in deaths:
            if death is not None:
                raise EngineDeadError(death)

    def shutdown(self) -> None:
        """End the workers, by force if they do not hear. Safe to call twice."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.end()

    def _call(
        self, command: messages.Command, on_progress: ProgressCallback | None = None
    ) -> list[FinalReply]:
        """Send a command to all and wait for their replies; progress is told in this thread.

        The first error is raised at once: the others may wait for the worker that has it.
        """
        events: SimpleQueue[messages.Progress | Call] = SimpleQueue()
        calls = [Call(rank, events) for rank in range(len(self._workers))]
        for call, worker in zip(calls, self._workers, strict=True):
            worker.start(call, command)
        replies: dict[int, FinalReply] = {}
        while len(replies) < len(calls):
            event = events.get()
            if isinstance(event, Call):
                replies[event.rank] = event.future.result()
            elif on_progress is not None:
                on_progress(event.stage, event.progress)
        return [replies[rank] for rank in range(len(calls))]

    def _remember(self, output: ModelRunnerOutput) -> None:
        if self._num_stages > 1:
            self._untold.append(output)

    def _give_up(self, rank: int) -> None:
        """Count the engine as dead when workers hang after a failure of one."""
        self._death = f"worker {rank} failed in a step, and others wait for it"
        logger.error("%s; ending all of them", self._death)
        for worker in self._workers:
            worker.kill()


class _StepReplies:
    """What the workers answer to one `Sample`.

    Args:
        calls: One to each worker.
        output: Gets the answer of one of them, or an error.
        sampler: Rank of that one.
        give_up: Called with the rank of a worker that failed while others don't answer.
        remember: Called with the answer, before anybody else has it.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        output: Future[ModelRunnerOutput],
        sampler: int,
        give_up: Callable[[int], None],
        remember: Callable[[ModelRunnerOutput], None],
    ) -> None:
        self._calls = calls
        self._output = output
        self._sampler = sampler
        self._give_up = give_up
        self._remember = remember
        self._lock = threading.Lock()
        self._missing = len(calls)
        self._timer: threading.Timer | None = None

    def take(self, reply: Future[FinalReply]) -> None:
        """Count one answer."""
        error = reply.exception()
        with self._lock:
            self._missing -= 1
            is_last = self._missing == 0
            if self._output.done():
                return
            if is_last and self._timer is not None:
                self._timer.cancel()
        if isinstance(error, EngineDeadError):
            self._fail(error)
        elif is_last:
            self._finish()
        elif error is not None:
            self._watch(reply)

    def _finish(self) -> None:
        for call in self._calls:
            error = call.future.exception()
            if error is not None:
                self._fail(error)
                return
        sampled = self._calls[self._sampler].future.result()
        assert isinstance(sampled, messages.Sampled)
        self._remember(sampled.output)
        self._output.set_result(sampled.output)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._output.done():
                self._output.set_exception(error)

    def _watch(self, reply: Future[FinalReply]) -> None:
        ranks = [call.rank for call in self._calls if call.future is reply]
        self._timer = threading.Timer(FAILURE_GRACE, self._give_up, ranks)
        self._timer.daemon = True
        self._timer.start()


def _with_seeds(scheduler_output: SchedulerOutput) -> SchedulerOutput:
    """Choose the seeds that nobody has chosen, so that all workers have the same."""
    requests = scheduler_output.new_requests
    if all(request.sampling_params.seed is not None for request in requests):
        return scheduler_output
    return msgspec.structs.replace(
        scheduler_output, new_requests=[_with_seed(request) for request in requests]
    )


def _with_seed(request: NewRequestData) -> NewRequestData:
    params = request.sampling_params
    if params.seed is not None:
        return request
    seeded = msgspec.structs.replace(params, seed=secrets.randbits(SEED_BITS))
    return msgspec.structs.replace(request, sampling_params=seeded)
