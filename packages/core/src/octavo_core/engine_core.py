"""The loop that schedules, runs and post-processes; one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from octavo_core.block_manager import BlockManager
from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError, UserError
from octavo_core.executor import Executor, ProgressCallback
from octavo_core.memory_planner import plan_kv_cache, resolve_max_model_len
from octavo_core.model_spec import ModelSpec
from octavo_core.policies import load_policy
from octavo_core.scheduler import Scheduler, refusal
from octavo_core.wire import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, Ready

logger = logging.getLogger(__name__)


class EngineCore:
    """A scheduler and an executor, without any process or socket around them.

    The same class runs in the engine process of a server and inside ``LLM``.

    Args:
        config: All settings.
        spec: The model's hyper-parameters.
        executor: Not started yet; the engine starts it and shuts it down.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec, executor: Executor) -> None:
        self.config = config
        self.spec = spec
        self._executor = executor
        self._scheduler: Scheduler | None = None
        self._refusals: list[EngineCoreOutput] = []

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
        policy = load_policy(self.config.scheduler.scheduling_policy)
        self._executor.load_model(on_progress)
        loaded = time.perf_counter()
        logger.info("Loading the model took %.2f seconds", loaded - started)
        on_progress("planning the KV cache", None)
        plan = plan_kv_cache(
            self.spec,
            self.config,
            self._executor.determine_available_memory(),
            self._executor.dtype,
        )
        logger.info("KV cache size: %d tokens", plan.kv_cache_tokens)
        logger.info(
            "Maximum concurrency for %d tokens per request: %.2fx",
            plan.max_model_len,
            plan.max_concurrency,
        )
        self._executor.initialize_kv_cache(plan.num_blocks)
        on_progress("warming up", None)
        self._executor.warm_up()
        logger.info(
            "Planning, KV cache and warm-up took %.2f seconds", time.perf_counter() - loaded
        )
        blocks = BlockManager(
            plan.num_blocks, plan.block_size, self.config.cache.enable_prefix_caching
        )
        self._scheduler = Scheduler(self.config.scheduler, blocks, plan.max_model_len, policy)
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
        """Put a request in line. If it can't be served, the next `step` says why."""
        try:
            self.scheduler.add_request(request)
        except UserError as error:
            self._refusals.append(refusal(request.request_id, error))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests in any state, without an output. Unknown ids are ignored."""
        self.scheduler.abort_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        """True if `step` has something to do."""
        return bool(self._refusals) or self.scheduler.has_unfinished_requests()

    def check_health(self) -> None:
        """Look after the workers, which nobody else does while there is nothing to compute.

        Raises:
            EngineDeadError: A worker is gone.
        """
        self._executor.check_health()

    def step(self) -> EngineCoreOutputs:
        """Run one step.

        A step that raises ends the requests that were part of it, each with an error that
        names it; the engine and all other requests go on.

        Raises:
            EngineDeadError: The workers are gone; nothing can be computed any more.
        """
        outputs, self._refusals = self._refusals, []
        if self.scheduler.has_unfinished_requests():
            outputs = outputs + self._run_step()
        return EngineCoreOutputs(outputs, self.scheduler.stats())

    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""
        self._executor.shutdown()

    def _run_step(self) -> list[EngineCoreOutput]:
        scheduler = self.scheduler
        scheduler_output = scheduler.schedule()
        try:
            self._executor.execute_model(scheduler_output)
            output = self._executor.sample_tokens(None).result()
        except EngineDeadError:
            raise
        except Exception:
            logger.exception("Step %d failed", scheduler_output.step_id)
            return scheduler.fail_step(
                scheduler_output.step_id,
                "The engine failed while it computed this request; its log has the cause.",
            )
        return scheduler.update_from_output(output)
