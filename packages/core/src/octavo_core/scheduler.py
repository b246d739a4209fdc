"""Decides, step by step, which tokens of which requests are computed.

There is one token budget a step and no prefill or decode phase: every request moves
``num_computed_tokens`` towards ``num_tokens``. Running requests come first, those that
decode before those that still prefill, so that a long prompt delays nobody's next
token; then waiting requests are admitted while budget, slots and blocks last.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo_core.block_manager import BlockManager
from octavo_core.config import SchedulerConfig
from octavo_core.errors import ContextLengthError, InvalidRequestError, UserError
from octavo_core.policies import FCFSPolicy, SchedulingPolicy
from octavo_core.request import Request, RequestStatus
from octavo_core.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest, SchedulerStats


class _Step:
    """A step in the making, and what is needed to complete it or to take it back."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.scheduled: dict[Request, int] = {}  # number of tokens, in order
        self.admitted: list[Request] = []
        self.new_block_ids: dict[Request, list[int]] = {}
        self.registered_block_ids: list[int] = []
        self.has_preempted = False

    def schedule(self, request: Request, num_tokens: int) -> None:
        self.scheduled[request] = num_tokens
        self.budget -= num_tokens

    def take_back(self, request: Request) -> None:
        """Drop a request that became a victim after it was scheduled."""
        self.budget += self.scheduled.pop(request, 0)
        self.new_block_ids.pop(request, None)


class Scheduler:
    """Continuous batching over a paged KV cache.

    Args:
        config: Limits of a step.
        blocks: The block manager, which this scheduler alone uses.
        max_model_len: Most tokens of a request.
        policy: Order of the waiting requests; first come, first served by default.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        max_model_len: int,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_prefill_tokens = (
            config.long_prefill_token_threshold or config.max_num_batched_tokens
        )
        self._policy = policy if policy is not None else FCFSPolicy()
        self._running: list[Request] = []  # in order of admission
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))  # the lowest is next
        self._slots_to_tell: list[int] = []  # freed, and not told to the workers yet
        self._step_id = 0
        self._in_flight: _Step | None = None

    # Requests come and go

    def add_request(self, new_request: EngineCoreRequest) -> None:
        """Put a request in line.

        Raises:
            InvalidRequestError: The id is in use, or the prompt is empty.
            ContextLengthError: Prompt and answer can never fit.
        """
        if new_request.request_id in self._requests:
            raise InvalidRequestError(
                f"request_id {new_request.request_id!r} is in use by a request in flight.",
                field="request_id",
            )
        request = Request(new_request, self.max_model_len)
        self._check_fits(request)
        self._requests[request.request_id] = request
        self._policy.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests in any state. Unknown ids are ignored; nothing is reported for them."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        """True while any request runs or waits."""
        return bool(self._requests)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a slot, in order of admission."""
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in line, preempted ones included."""
        return len(self._policy)

    def stats(self) -> SchedulerStats:
        """Return the load as it is now; counters are totals since the start."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._policy),
            kv_cache_usage=self.blocks.pool.usage,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=self.blocks.num_prefix_queries,
            prefix_cache_hits=self.blocks.num_prefix_hits,
        )

    # One step

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and give them their blocks.

        There is always something to choose while a request is unfinished: the oldest can
        preempt all others, and alone it fits. Tokens count as computed from here on. Call
        `update_from_output` or `fail_step` before the next `schedule`.
        """
        assert self._in_flight is None, "schedule() before the last step was completed"
        self._step_id += 1
        step = _Step(self._step_id, self._max_num_batched_tokens)
        self._schedule_running(step)
        if not step.has_preempted:
            self._admit_waiting(step)
        self._in_flight = step
        return self._commit(step)

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append what a step sampled, and end the requests that are complete.

        Returns:
            One output for each request that got a token.
        """
        step = self._complete(output.step_id)
        outputs: list[EngineCoreOutput] = []
        has_ended = False
        for index, (request, token_id) in enumerate(
            zip(step.scheduled, output.sampled_token_ids, strict=True)
        ):
            if token_id < 0 or request.is_finished:
                continue
            if request.append(token_id):
                has_ended = True
                self._release(request)
            row_logprobs = output.logprobs.get(index)
            outputs.append(
                EngineCoreOutput(
                    request.request_id,
                    [token_id],
                    request.status.finish_reason,
                    request.stop_reason,
                    None if row_logprobs is None else [row_logprobs],
                    request.num_cached_tokens,
                )
            )
        if has_ended:
            self._running = [request for request in self._running if not request.is_finished]
        return outputs

    def fail_step(self, step_id: int, message: str) -> list[EngineCoreOutput]:
        """End every request of a step that raised, and take back what it told the prefix cache.

        Requests that were not part of the step are untouched.
        """
        step = self._complete(step_id)
        self.blocks.forget(step.registered_block_ids)
        outputs = []
        for request in step.scheduled:
            if request.is_finished:
                continue
            self._end(request, RequestStatus.FINISHED_ERROR)
            outputs.append(
                EngineCoreOutput(
                    request.request_id,
                    [],
                    RequestStatus.FINISHED_ERROR.finish_reason,
                    error=message,
                    error_kind="RequestFailedError",
                )
            )
        return outputs

    # Phases of schedule()

    def _schedule_running(self, step: _Step) -> None:
        prefilling = []
        for request in tuple(self._running):
            if step.budget <= 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue  # a victim of one before it
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            if num_tokens == 1:
                self._schedule_tokens(step, request, 1)
            else:
                prefilling.append(request)
        for request in prefilling:
            if step.budget <= 0:
                return
            if request.status is RequestStatus.RUNNING:
                num_tokens = request.num_tokens - request.num_computed_tokens
                self._schedule_tokens(step, request, self._clip(step, num_tokens))

    def _schedule_tokens(self, step: _Step, request: Request, num_tokens: int) -> None:
        """Schedule a running request; others, or it itself, are preempted if blocks lack."""
        end = request.num_computed_tokens + num_tokens
        new_block_ids = self.blocks.grow(request, end)
        while new_block_ids is None:
            victim = self._policy.choose_victim(self._running)
            self._preempt(step, victim)
            if victim is request:
                return
            new_block_ids = self.blocks.grow(request, end)
        if new_block_ids:
            step.new_block_ids[request] = new_block_ids
        step.schedule(request, num_tokens)

    def _admit_waiting(self, step: _Step) -> None:
        policy, blocks = self._policy, self.blocks
        while step.budget > 0 and self._free_slots and len(policy):
            request = policy.peek()
            cached_block_ids = blocks.find_cached_prefix(request)
            num_cached_tokens = len(cached_block_ids) * blocks.block_size
            num_tokens = self._clip(step, request.num_tokens - num_cached_tokens)
            if not blocks.admit(
                request,
                cached_block_ids,
                num_cached_tokens + num_tokens,
                others_run=bool(self._running),
            ):
                return
            policy.pop()
            request.status = RequestStatus.RUNNING
            request.slot = self._free_slots.pop()
            request.num_computed_tokens = num_cached_tokens
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached_tokens
            self._running.append(request)
            step.admitted.append(request)
            step.schedule(request, num_tokens)
            # At once, so that the next one in line finds this one's blocks.
            self._register_full_blocks(step, request, num_cached_tokens + num_tokens)

    def _commit(self, step: _Step) -> SchedulerOutput:
        """Count the step's tokens as computed, and put it in the workers' terms."""
        slots, counts, positions = [], [], []
        block_size = self.blocks.block_size
        for request, num_tokens in step.scheduled.items():
            start = request.num_computed_tokens
            end = start + num_tokens
            slots.append(request.slot)
            counts.append(num_tokens)
            positions.append(start)
            if end // block_size > request.num_registered_blocks:
                self._register_full_blocks(step, request, end)
        output = SchedulerOutput(
            step.step_id,
            self._slots_to_tell,
            [self._new_request_data(request) for request in step.admitted],
            [(request.slot, ids) for request, ids in step.new_block_ids.items()],
            slots,
            counts,
            positions,
        )
        self._slots_to_tell = []
        for request, num_tokens in step.scheduled.items():
            request.num_computed_tokens += num_tokens
        return output

    def _new_request_data(self, request: Request) -> NewRequestData:
        return NewRequestData(
            request.slot,
            request.request_id,
            list(request.token_ids),
            request.num_prompt_tokens,
            request.sampling_params,
            list(request.block_ids),
            request.num_computed_tokens,
        )

    def _register_full_blocks(self, step: _Step, request: Request, num_tokens: int) -> None:
        step.registered_block_ids += self.blocks.register_full_blocks(request, num_tokens)

    def _clip(self, step: _Step, num_tokens: int) -> int:
        return min(num_tokens, step.budget, self._max_prefill_tokens)

    # Ends

    def _preempt(self, step: _Step, request: Request) -> None:
        """Put a running request back in line. Its full blocks stay findable."""
        step.has_preempted = True
        step.take_back(request)
        self._running.remove(request)
        self._give_back_slot(request)
        self.blocks.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self._policy.requeue(request)

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._policy.remove(request)
        request.status = status
        self._release(request)

    def _release(self, request: Request) -> None:
        """Give back all that an ended request holds."""
        self.blocks.free(request)
        if request.slot >= 0:
            self._give_back_slot(request)
        del self._requests[request.request_id]

    def _give_back_slot(self, request: Request) -> None:
        self._free_slots.append(request.slot)
        self._slots_to_tell.append(request.slot)
        request.slot = -1

    def _complete(self, step_id: int) -> _Step:
        step, self._in_flight = self._in_flight, None
        assert step is not None, "no step is in flight"
        assert step.step_id == step_id, f"step {step_id} is not in flight"
        return step

    def _check_fits(self, request: Request) -> None:
        if request.num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt is empty; it needs a token.", field="prompt")
        if request.num_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {request.num_tokens} tokens, but the context of "
                f"{self.max_model_len} tokens (max_model_len) must also hold at least one token of "
                f"the answer.",
                field="prompt",
            )
        pool_tokens = self.blocks.pool.num_blocks * self.blocks.block_size
        if request.max_total_tokens > pool_tokens:
            raise ContextLengthError(
                f"The prompt has {request.num_prompt_tokens} tokens and max_tokens asks for up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} more, but the whole KV "
                f"cache holds {pool_tokens} tokens; shorten the prompt, lower max_tokens, or give "
                f"the server more --kv-cache-memory.",
                field="max_tokens",
            )


def refusal(request_id: str, error: UserError) -> EngineCoreOutput:
    """Return the one output of a request that was refused."""
    return EngineCoreOutput(
        request_id,
        [],
        RequestStatus.FINISHED_ERROR.finish_reason,
        error=error.message,
        error_kind=type(error).__name__,
    )
