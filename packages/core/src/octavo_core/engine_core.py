"""The loop that schedules, runs and post-processes, with a few steps in flight."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from octavo_core.block_manager import BlockManager
from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError, InvalidRequestError, RequestFailedError, UserError
from octavo_core.executor import Executor, ProgressCallback
from octavo_core.grammar import Grammar
from octavo_core.grammar_compiler import GrammarCompiler
from octavo_core.kv_events import KVEvent
from octavo_core.memory_planner import check_parallel, plan_kv_cache, resolve_max_model_len
from octavo_core.model_spec import ModelSpec
from octavo_core.policies import load_policy
from octavo_core.pooler_spec import PoolerSpec
from octavo_core.scheduler import Scheduler
from octavo_core.scheduler_output import ModelRunnerOutput
from octavo_core.step_outputs import failure
from octavo_core.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Ready,
    SchedulerStats,
)

logger = logging.getLogger(__name__)


class EngineCore:
    """A scheduler and an executor, without any process or socket around them.

    The same class runs in the engine process of a server and inside ``LLM``.

    Args:
        config: All settings.
        spec: The model's hyper-parameters.
        executor: Not started yet; the engine starts it and shuts it down.
        grammars: Compiles the grammars of structured output; None refuses such requests.
        pooler: What the model pools; None for a model that generates.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        executor: Executor,
        grammars: GrammarCompiler | None = None,
        pooler: PoolerSpec | None = None,
    ) -> None:
        self.config = config
        self.spec = spec
        self._executor = executor
        self._grammars = grammars
        self._pooler = pooler
        # Requests whose grammar is being compiled: they are not in line yet.
        self._compiling: dict[str, tuple[EngineCoreRequest, Future[Grammar]]] = {}
        self._scheduler: Scheduler | None = None
        self._refusals: list[EngineCoreOutput] = []
        # Steps in flight, the oldest first.
        self._batch_queue: deque[Future[ModelRunnerOutput]] = deque()
        self._batch_queue_size = 1

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which exists once the engine was started."""
        assert self._scheduler is not None, "the engine was not started"
        return self._scheduler

    def start(self, on_progress: ProgressCallback) -> Ready:
        """Load the model, plan and allocate the KV cache, and warm up.

        Raises:
            ConfigError: The settings don't fit the model or the memory.
            ModelError: The model can't be loaded.
        """
        started = time.perf_counter()
        # Refuse before the weights are read.
        resolve_max_model_len(self.spec, self.config)
        check_parallel(self.spec, self.config.parallel)
        policy = load_policy(self.config.scheduler.scheduling_policy)
        self._executor.load_model(on_progress)
        loaded = time.perf_counter()
        logger.info("Loading the model took %.2f seconds", loaded - started)
        on_progress("planning the KV cache", None)
        plan = plan_kv_cache(
            self.spec,
            self.config,
            self._executor.determine_available_memory(),
            self._executor.kv_cache_dtype,
            self._executor.device_memory,
        )
        if plan.num_blocks:
            logger.info("KV cache size: %d tokens", plan.kv_cache_tokens)
            logger.info(
                "Maximum concurrency for %d tokens per request: %.2fx",
                plan.max_model_len,
                plan.max_concurrency,
            )
        # Each worker keeps its part of a host block.
        host_block_bytes = plan.block_bytes * self.config.parallel.world_size
        num_host_blocks = 0
        if plan.num_blocks:  # an encoder has none
            num_host_blocks = self.config.cache.swap_space // host_block_bytes
        self._executor.initialize_kv_cache(plan.num_blocks, num_host_blocks)
        planned = time.perf_counter()
        logger.info("Planning and allocating the KV cache took %.2f seconds", planned - loaded)
        on_progress("warming up", None)
        self._executor.warm_up(on_progress)
        logger.info("Warming up took %.2f seconds", time.perf_counter() - planned)
        blocks = BlockManager(
            plan.num_blocks,
            plan.block_size,
            self.config.cache.enable_prefix_caching,
            groups=plan.layout.groups,
            num_host_blocks=num_host_blocks,
            max_step_tokens=self.config.scheduler.max_num_batched_tokens,
            record_events=self.config.cache.kv_events_endpoint is not None,
        )
        self._scheduler = Scheduler(
            self.config.scheduler,
            blocks,
            plan.max_model_len,
            policy,
            num_stages=self.config.parallel.pipeline_parallel_size,
            whole_prompts=self.spec.is_encoder,
        )
        self._batch_queue_size = (
            self.config.scheduler.batch_queue_size or self._executor.max_concurrent_steps
        )
        return Ready(
            max_model_len=plan.max_model_len,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            kv_cache_tokens=plan.kv_cache_tokens,
            max_concurrency=plan.max_concurrency,
            dtype=self._executor.dtype,
            device=self._executor.device,
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        """Put a request in line. If it can't be served, the next `step` says why.

        Ids are the caller's to keep apart: a second request of one id is dropped, for an
        answer would end the first.
        """
        request_id = request.request_id
        if self.scheduler.has_request(request_id) or request_id in self._compiling:
            logger.error("Request id %s is in use; the second one is dropped", request.request_id)
            return
        params = request.sampling_params.structured_outputs
        problem = self._wrong_kind(request)
        if problem is not None:
            self._refusals.append(failure(request_id, problem))
        elif params is None:
            self._put_in_line(request, None)
        elif self._grammars is None:
            error = InvalidRequestError(
                "structured_outputs is not supported by this engine.", field="structured_outputs"
            )
            self._refusals.append(failure(request_id, error))
        else:
            self._compiling[request_id] = (request, self._grammars.start(params))
            self._take_compiled()

    def _wrong_kind(self, request: EngineCoreRequest) -> InvalidRequestError | None:
        """Return why a request is none for this model, or None."""
        pooling = request.pooling_params
        if self._pooler is None:
            if pooling is None:
                return None
            return InvalidRequestError(
                "this model generates text and pools none.", field="pooling_params"
            )
        if pooling is None:
            return InvalidRequestError(
                "this model pools texts and generates none.", field="sampling_params"
            )
        if pooling.task in self._pooler.tasks:
            return None
        return InvalidRequestError(
            f"task is {pooling.task}; this model takes {' or '.join(self._pooler.tasks)}.",
            field="task",
        )

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests in any state, without an output. Unknown ids are ignored."""
        self.scheduler.abort_requests(request_ids)
        for request_id in request_ids:
            self._compiling.pop(request_id, None)
        if self._refusals:
            gone = set(request_ids)
            self._refusals = [item for item in self._refusals if item.request_id not in gone]

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks, on the device and on the host."""
        self.scheduler.reset_prefix_cache()

    def take_kv_events(self) -> list[KVEvent]:
        """Return what happened to cached blocks since the last call, if the config asks for it."""
        return self.scheduler.blocks.take_events()

    def has_unfinished_requests(self) -> bool:
        """True if `step` has something to do."""
        if self._refusals or self._batch_queue or self._compiling:
            return True
        return self.scheduler.has_unfinished_requests()

    def stats(self) -> SchedulerStats:
        """Return the load as it is now, which `step` tells too."""
        stats = self.scheduler.stats()
        if self._compiling:
            num_waiting = stats.num_waiting + len(self._compiling)
            return msgspec.structs.replace(stats, num_waiting=num_waiting)
        return stats

    def check_health(self) -> None:
        """Look after the workers, which nobody else does while there is nothing to compute.

        The time is also used to get ready for structured output, which holds Python's lock for
        some 100 ms: a stream would feel it.

        Raises:
            EngineDeadError: A worker is gone.
        """
        if self._grammars is not None:
            self._grammars.prepare()
        self._executor.check_health()

    def step(self) -> EngineCoreOutputs:
        """Keep the workers busy, and wait for the oldest step in flight.

        A step that raises is taken back with all that follow it, and its requests are
        computed again in groups, until the one that makes it fail is found. That one
        ends with an error that names it; all others go on.

        Raises:
            EngineDeadError: The workers are gone; nothing can be computed any more.
        """
        self._take_compiled()
        outputs, self._refusals = self._refusals, []
        outputs = outputs + self.scheduler.expire(time.time())
        self._fill_batch_queue()
        if self._batch_queue:
            outputs += self._complete_oldest_step()
        elif self._compiling and self._grammars is not None:
            self._grammars.wait([future for _, future in self._compiling.values()])
        return EngineCoreOutputs(outputs, self.stats())

    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""
        self._executor.shutdown()

    def _take_compiled(self) -> None:
        """Put those in line whose grammar is there."""
        if not self._compiling:
            return
        done = [item for item in self._compiling.values() if item[1].done()]
        for request, future in done:
            del self._compiling[request.request_id]
            self._put_in_line(request, future)

    def _put_in_line(self, request: EngineCoreRequest, grammar: Future[Grammar] | None) -> None:
        try:
            matcher = None if grammar is None else grammar.result().new_matcher()
            if matcher is not None and request.output_token_ids:
                matcher.accept_tokens(request.output_token_ids)
            self.scheduler.add_request(request, matcher)
        except UserError as error:
            self._refusals.append(failure(request.request_id, error))
        except Exception as error:
            if grammar is None:
                raise
            logger.exception("The grammar of request %s failed", request.request_id)
            text = f"The grammar of request {request.request_id} failed: {error}"
            self._refusals.append(failure(request.request_id, RequestFailedError(text)))

    def _fill_batch_queue(self) -> None:
        while len(self._batch_queue) < self._batch_queue_size:
            scheduler_output = self.scheduler.schedule(time.time())
            if scheduler_output is None:
                return
            try:
                self._executor.execute_model(scheduler_output)
                grammar, failures = self.scheduler.fill_bitmasks()
                self._refusals += failures
                future = self._executor.sample_tokens(grammar)
            except EngineDeadError:
                raise
            except Exception as error:  # as if the workers had said so
                future = Future()
                future.set_exception(error)
            self._batch_queue.append(future)

    def _complete_oldest_step(self) -> list[EngineCoreOutput]:
        try:
            output = self._batch_queue.popleft().result()
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("A step failed; its requests are tried again in groups")
            self._await_steps_in_flight()
            return self.scheduler.roll_back(f"{type(error).__name__}; the server's log has more.")
        return self.scheduler.update_from_output(output)

    def _await_steps_in_flight(self) -> None:
        """Let the workers finish what was sent after a step that failed; nothing of it counts."""
        while self._batch_queue:
            error = self._batch_queue.popleft().exception()
            if isinstance(error, EngineDeadError):
                raise error
