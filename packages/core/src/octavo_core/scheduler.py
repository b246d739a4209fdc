"""Decides, step by step, which tokens of which requests are computed.

There is one token budget a step and no prefill or decode phase: every request moves
``num_computed_tokens`` towards the end of its tokens. Running requests come first, those
that decode before those that still prefill, so that a long prompt delays nobody's next
token; then waiting requests are admitted while budget, slots and blocks last.

Steps may be scheduled ahead: the tokens of a step in flight are not known, but that they
will come is, and a request that decodes needs no more to be scheduled again. What it is
given too much, because the token turns out to end it, is ignored when it comes back.

A request under a grammar is never ahead: which tokens may come next depends on the last one.
Its steps go on as its tokens come back, while others are ahead of it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

import msgspec

from octavo_core.bisection import Bisection, Suspect
from octavo_core.block_manager import BlockManager, CachedPrefix, StepEffects
from octavo_core.config import SchedulerConfig
from octavo_core.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    OctavoError,
    QueueFullError,
    RequestFailedError,
    UserError,
)
from octavo_core.grammar import GrammarMatcher
from octavo_core.policies import FCFSPolicy, SchedulingPolicy
from octavo_core.pooling_params import PooledOutput
from octavo_core.request import Request, RequestStatus
from octavo_core.scheduler_output import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest, SchedulerStats


class _Step:
    """A step in the making or in flight, and what is needed to complete or take it back.

    Attributes:
        budget: Tokens that may still be scheduled.
        now: When it is scheduled, in seconds since the epoch.
        requests, counts, starts: Who computes how many tokens from which position on.
        admitted: Those that enter a slot, with what the prefix cache had for them.
        added: Blocks for those that were in their slot before.
        constrained: Those whose next token is sampled under a grammar.
        has_grammars: Some request is under a grammar, whether its next token is sampled or not.
    """

    __slots__ = (
        "added",
        "admitted",
        "budget",
        "constrained",
        "counts",
        "effects",
        "freed_slots",
        "has_grammars",
        "has_preempted",
        "now",
        "requests",
        "starts",
        "step_id",
    )

    def __init__(self, budget: int, now: float) -> None:
        self.step_id = 0
        self.budget = budget
        self.now = now
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.starts: list[int] = []
        self.admitted: list[tuple[Request, CachedPrefix]] = []
        self.added: dict[Request, list[list[int]]] = {}
        self.constrained: list[Request] = []
        self.has_grammars = False
        self.has_preempted = False
        self.effects: StepEffects
        self.freed_slots: list[int]

    def add(self, request: Request, num_tokens: int, start: int) -> None:
        self.requests.append(request)
        self.counts.append(num_tokens)
        self.starts.append(start)
        self.budget -= num_tokens
        end = start + num_tokens
        request.num_computed_tokens = end
        if end >= len(request.token_ids):
            request.is_decoding = True
            if request.matcher is not None:
                self.constrained.append(request)
        self.has_grammars |= request.matcher is not None

    def take_back(self, request: Request) -> None:
        """Drop a request that became a victim, if it was scheduled already."""
        self.added.pop(request, None)
        if request not in self.requests:
            return
        index = self.requests.index(request)
        del self.requests[index]
        self.budget += self.counts.pop(index)
        request.num_computed_tokens = self.starts.pop(index)
        if request in self.constrained:
            self.constrained.remove(request)


class Scheduler:
    """Continuous batching over a paged KV cache.

    Args:
        config: Limits of a step and of the line.
        blocks: The block manager, which this scheduler alone uses.
        max_model_len: Most tokens of a request.
        policy: Order of the waiting requests; first come, first served by default.
        num_stages: Pipeline stages of the workers. With several, a request that decodes is in
            one step at a time, and the steps in flight share the requests, so that each stage
            has one of them to compute.
        whole_prompts: A prompt is computed in one step or not at all, as encoders need it; so
            the budget of a step holds the longest.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        max_model_len: int,
        policy: SchedulingPolicy | None = None,
        *,
        num_stages: int = 1,
        whole_prompts: bool = False,
    ) -> None:
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._long_prefill_token_threshold = config.long_prefill_token_threshold
        self._max_num_queued_reqs = config.max_num_queued_reqs
        self._max_num_queued_tokens = config.max_num_queued_tokens
        self._num_stages = num_stages
        self._whole_prompts = whole_prompts
        if whole_prompts:
            self._max_num_batched_tokens = max(max_model_len, self._max_num_batched_tokens)
        self._policy = policy if policy is not None else FCFSPolicy()
        self._running: list[Request] = []  # in order of admission
        self._requests: dict[str, Request] = {}
        self._num_queued_tokens = 0
        self._deadlines: list[tuple[float, str]] = []  # a heap; ended requests stay in it
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))  # the lowest is next
        self._slots_to_tell: list[int] = []  # freed, and not told to the workers yet
        self._step_id = 0
        self._in_flight: deque[_Step] = deque()  # the oldest is first
        self._bisection = Bisection()
        self._head_is_blocked = False  # when it was last asked, there were not enough blocks

    # Requests come and go

    def add_request(
        self, new_request: EngineCoreRequest, matcher: GrammarMatcher | None = None
    ) -> None:
        """Put a request in line.

        Args:
            matcher: For structured output, at the end of the request's output tokens.

        Raises:
            InvalidRequestError: The id is in use, the prompt is empty, or a value can't be.
            ContextLengthError: Prompt and answer can never fit.
            QueueFullError: The line is as long as it may be.
        """
        if new_request.request_id in self._requests:
            raise InvalidRequestError(
                f"request_id {new_request.request_id!r} is in use by a request in flight.",
                field="request_id",
            )
        request = Request(new_request, self.max_model_len, matcher)
        _check_values(request)
        self._check_fits(request)
        # A request that is resumed on a new engine was let in before.
        if not new_request.is_resumed:
            self._check_line(request)
        self._requests[request.request_id] = request
        self._num_queued_tokens += len(request.token_ids)
        self._policy.add(request)
        if request.deadline is not None:
            self._note_deadline(request.deadline, request.request_id)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests in any state. Unknown ids are ignored; nothing is reported for them."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, RequestStatus.FINISHED_ABORTED)

    def expire(self, now: float) -> list[EngineCoreOutput]:
        """End the requests whose deadline has passed.

        Args:
            now: Seconds since the epoch.

        Returns:
            One output for each of them.
        """
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is None or request.deadline != deadline:
                continue  # it ended before, and its id may be another's by now
            allowed = deadline - request.arrival_time
            error = DeadlineExceededError(
                f"The deadline of this request ({allowed:.3g} s after its arrival) has passed "
                f"with {request.num_output_tokens} tokens generated."
            )
            self._end(request, RequestStatus.FINISHED_ERROR)
            outputs.append(failure(request_id, error))
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks. Requests that run keep theirs, for themselves alone."""
        self.blocks.reset_prefix_cache()
        for request in self._running:
            request.may_cache = False

    def has_unfinished_requests(self) -> bool:
        """True while any request runs or waits."""
        return bool(self._requests)

    def has_request(self, request_id: str) -> bool:
        """True while the request with this id runs or waits."""
        return request_id in self._requests

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a slot, in order of admission."""
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in line, preempted ones included."""
        return len(self._policy)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were scheduled and are not complete."""
        return len(self._in_flight)

    def stats(self) -> SchedulerStats:
        """Return the load as it is now; counters are totals since the start."""
        blocks = self.blocks
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._policy),
            kv_cache_usage=blocks.pool.usage,
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=blocks.num_prefix_queries,
            prefix_cache_hits=blocks.num_prefix_hits,
            num_waiting_tokens=self._num_queued_tokens,
            host_cache_hits=blocks.num_host_hits,
            host_cache_usage=blocks.host.num_used / max(1, blocks.host.num_blocks),
        )

    # One step

    def schedule(self, now: float = 0.0) -> SchedulerOutput | None:
        """Choose the tokens of the next step and give them their blocks.

        Tokens count as computed from here on.

        Args:
            now: Seconds since the epoch, which only reports carry.

        Returns:
            The step, or None if there is nothing to compute before a step in flight is
            complete. With none in flight and a request unfinished there always is: the
            oldest can preempt all others, and alone it fits.
        """
        step = _Step(self._max_num_batched_tokens, now)
        if self._bisection:
            self._schedule_suspects(step)
        if not self._bisection:
            running = self._running if self._num_stages == 1 else self._share_of_a_step()
            self._schedule_running(step, running)
            if not step.has_preempted:
                self._admit_waiting(step)
        if not step.requests:
            return None
        self._step_id += 1
        step.step_id = self._step_id
        self._in_flight.append(step)
        return self._commit(step)

    def fill_bitmasks(self) -> tuple[GrammarOutput | None, list[EngineCoreOutput]]:
        """Say what the newest step may sample; to be called while its forward pass runs.

        Returns:
            The masks of the requests under a grammar, if the step samples for any, and the last
            outputs of requests whose matcher has failed.
        """
        slots: list[int] = []
        masks: list[bytes] = []
        failures: list[EngineCoreOutput] = []
        for request in self._in_flight[-1].constrained:
            assert request.matcher is not None
            try:
                masks.append(request.matcher.bitmask())
                slots.append(request.slot)
            except Exception as error:
                failures.append(self._fail_constrained(request, error))
        return (GrammarOutput(slots, b"".join(masks)) if slots else None), failures

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append what the oldest step in flight has sampled, and end what is complete.

        Returns:
            One output for each request that got a token.
        """
        step = self._in_flight.popleft()
        assert step.step_id == output.step_id, f"step {output.step_id} is not the oldest in flight"
        outputs: list[EngineCoreOutput] = []
        has_ended = False
        if output.prompt_logprobs:
            _collect_prompt_logprobs(step, output)
        if output.pooled:
            outputs += self._finish_pooled(step, output.pooled)
            has_ended = True
        for request, token_id in zip(step.requests, output.sampled_token_ids, strict=True):
            if token_id < 0:
                continue
            if request.slot < 0 and not self._was_awaited(request):
                continue  # it has ended
            if request.matcher is not None:
                outputs.append(self._update_constrained(request, request.matcher, token_id))
                has_ended |= request.is_finished
                continue
            token_ids = request.token_ids
            token_ids.append(token_id)
            if token_id in request.stop_ids or len(token_ids) >= request.max_total_tokens:
                if request.ends_with(token_id):
                    has_ended = True
                    self._finish(request)
                    outputs.append(_last_output(request, token_id))
                    continue
            elif request.report_due:
                request.report_due = False
                outputs.append(_first_output(request, token_id))
                continue
            outputs.append(EngineCoreOutput(request.request_id, [token_id]))
        if has_ended:
            self._running = [request for request in self._running if request.slot >= 0]
        if output.logprobs:
            return _with_logprobs(step, output, outputs)
        return outputs

    def roll_back(self, message: str) -> list[EngineCoreOutput]:
        """Take back all steps in flight after the oldest has failed.

        Every running request goes back in line with the tokens it has; it is computed
        again, from what earlier steps left in the prefix cache. Those of the failed step
        come back in groups, until it is clear which of them makes its steps fail.

        Args:
            message: What went wrong, for the culprit's client.

        Returns:
            The culprit's last output, once it is found.
        """
        steps, self._in_flight = self._in_flight, deque()
        self.blocks.forget(self.blocks.take_effects())
        for step in steps:
            self.blocks.forget(step.effects)
        for request in reversed(self._running.copy()):
            self._put_back(request)
        for request in self._requests.values():
            request.num_awaited_tokens = 0
        untold = set(self._slots_to_tell).union(*(step.freed_slots for step in steps))
        self._slots_to_tell = sorted(untold)
        culprit = self._bisection.accuse(_suspects_of(steps[0]))
        if culprit is None:
            return []
        self._end(culprit, RequestStatus.FINISHED_ERROR)
        text = f"Request {culprit.request_id} made the engine's step fail: {message}"
        return [failure(culprit.request_id, RequestFailedError(text))]

    # Phases of schedule()

    def _share_of_a_step(self) -> list[Request]:
        """Return the running requests that wait for no token, as many as one stage's share.

        The steps in flight hold at most the others' shares, so nobody is left out for long.
        """
        ready = [
            request
            for request in self._running
            if request.num_computed_tokens < len(request.token_ids)
        ]
        share = -(-len(self._running) // self._num_stages)
        return ready[:share]

    def _schedule_running(self, step: _Step, running: list[Request]) -> None:
        requests, counts, starts = step.requests, step.counts, step.starts
        budget = step.budget
        others = []
        for request in running:
            start = request.num_computed_tokens
            if start >= request.decode_limit:  # always so while it prefills
                others.append(request)
            elif len(requests) < budget:
                requests.append(request)
                starts.append(start)
                request.num_computed_tokens = start + 1
        counts += [1] * len(requests)
        step.budget -= len(requests)
        if others:
            self._schedule_others(step, others)

    def _schedule_others(self, step: _Step, others: list[Request]) -> None:
        """Schedule decodes that need a block, and then prefills."""
        for is_decoding in (True, False):
            for request in others:
                if step.budget <= 0:
                    return
                # A victim of one before it has no slot any more.
                if request.slot < 0 or request.is_decoding is not is_decoding:
                    continue
                start = request.num_computed_tokens
                if not is_decoding:
                    num_tokens = self._clip(step, request, len(request.token_ids) - start)
                    self._schedule_tokens(step, request, num_tokens)
                elif request.matcher is not None:
                    # None if its token is in flight; several after some were forced.
                    num_known = len(request.token_ids) - start
                    if num_known > 0:
                        self._schedule_tokens(step, request, min(num_known, step.budget))
                elif start < request.max_total_tokens - 1:  # else its last token is in flight
                    self._schedule_tokens(step, request, 1)

    def _schedule_tokens(self, step: _Step, request: Request, num_tokens: int) -> None:
        """Schedule a running request; others, or it itself, are preempted if blocks lack."""
        start = request.num_computed_tokens
        if start + num_tokens > request.capacity:
            added = self.blocks.grow(request, start + num_tokens)
            while added is None:
                victim = self._policy.choose_victim(self._running)
                self._preempt(step, victim)
                if victim is request:
                    return
                added = self.blocks.grow(request, start + num_tokens)
            step.added[request] = added
        step.add(request, num_tokens, start)
        self._note_progress(request)

    def _admit_waiting(self, step: _Step) -> None:
        policy = self._policy
        while step.budget > 0 and self._free_slots and len(policy):
            request = policy.peek()
            if request.num_awaited_tokens:
                return  # a step in flight still samples for it
            self._head_is_blocked = not self._admit(step, request)
            if self._head_is_blocked:
                return
            popped = policy.pop()
            assert popped is request, "pop() must return what peek() returned"

    def _admit(self, step: _Step, request: Request) -> bool:
        """Give a waiting request a slot, its cached prefix and its first tokens, if they fit."""
        others_run = bool(self._running)
        if self.blocks.is_still_refused(request, others_run=others_run):
            return False
        prefix = self.blocks.find_cached_prefix(request)
        start = prefix.num_tokens
        num_tokens = self._clip(step, request, len(request.token_ids) - start)
        if self._whole_prompts and num_tokens < len(request.token_ids):
            return False
        if not self.blocks.admit(request, prefix, start + num_tokens, others_run=others_run):
            return False
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        if request.num_preemptions == 0 and request.num_output_tokens == 0:
            request.num_cached_tokens = min(start, request.num_prompt_tokens)
            request.scheduled_time = step.now
        request.report_due = True
        self._num_queued_tokens -= len(request.token_ids)
        self._running.append(request)
        step.admitted.append((request, prefix))
        step.add(request, num_tokens, start)
        self._note_progress(request)
        return True

    def _note_progress(self, request: Request) -> None:
        """Tell the prefix cache at once, so that the next one in line finds these blocks."""
        self.blocks.register_full_blocks(request)
        if request.is_decoding and request.matcher is None:
            # Up to here it needs no new block, and its last token is not in flight.
            request.decode_limit = min(request.capacity, request.max_total_tokens - 1)

    def _schedule_suspects(self, step: _Step) -> None:
        """Schedule the group on trial alone, one step at a time.

        Nobody else keeps a slot meanwhile: so the group has all blocks, and fits.
        """
        if self._in_flight:
            return
        group = self._bisection.group_on_trial()
        if not group:
            return
        for request in reversed(self._running.copy()):
            if request not in group:
                self.blocks.register_full_blocks(request)
                self._put_back(request)
        self._schedule_running(step, self._running)
        if step.has_preempted:
            return
        for request in group:
            if step.budget <= 0 or not self._free_slots:
                return
            if request.slot < 0:
                if not self._admit(step, request):
                    return
                self._policy.remove(request)

    def _commit(self, step: _Step) -> SchedulerOutput:
        """Put a step in the workers' terms."""
        step.effects = self.blocks.take_effects()
        step.freed_slots, self._slots_to_tell = self._slots_to_tell, []
        forced = _tell_forced_tokens(step) if step.has_grammars else []
        return SchedulerOutput(
            step.step_id,
            step.freed_slots,
            [_new_request_data(*admitted) for admitted in step.admitted],
            [(request.slot, added) for request, added in step.added.items()],
            [request.slot for request in step.requests],
            step.counts,
            step.starts,
            step.effects.swap_out,
            step.effects.swap_in,
            forced,
        )

    def _clip(self, step: _Step, request: Request, num_tokens: int) -> int:
        """Return how many of a prompt's tokens a step takes.

        Without a threshold of its own a prompt gets half of the budget while others wait who
        could start: so a long one delays a short one by a step, not by its whole prefill.
        """
        if self._whole_prompts:
            return min(num_tokens, step.budget)
        limit = self._long_prefill_token_threshold or self._max_num_batched_tokens
        if not self._long_prefill_token_threshold and self._others_could_start(request):
            limit = -(-self._max_num_batched_tokens // 2)
        return min(num_tokens, step.budget, limit)

    def _others_could_start(self, request: Request) -> bool:
        num_others = len(self._policy) - (request.slot < 0)
        return num_others > 0 and bool(self._free_slots) and not self._head_is_blocked

    # Pooling

    def _finish_pooled(
        self, step: _Step, pooled: dict[int, PooledOutput]
    ) -> list[EngineCoreOutput]:
        """End the requests whose texts are pooled; one that has ended before is left out."""
        outputs = []
        for index, result in pooled.items():
            request = step.requests[index]
            if request.is_finished:
                continue
            request.status = RequestStatus.FINISHED_STOPPED
            self._finish(request)
            outputs.append(_pooled_output(request, result))
        return outputs

    # Structured output

    def _update_constrained(
        self, request: Request, matcher: GrammarMatcher, token_id: int
    ) -> EngineCoreOutput:
        """Append a token, and those that the grammar leaves no choice about after it.

        Returns:
            The request's output, which is its last one if the grammar ends here.
        """
        request.token_ids.append(token_id)
        new_token_ids = [token_id]
        try:
            if not request.ends_with(token_id):
                matcher.accept_tokens(new_token_ids)
                self._append_forced(request, matcher, new_token_ids)
                if not request.is_finished and matcher.is_terminated:
                    request.status = RequestStatus.FINISHED_STOPPED
        except Exception as error:
            return self._fail_constrained(request, error, is_updating=True)
        if request.is_finished:
            self._finish(request)
        if not (request.report_due or request.is_finished):
            return EngineCoreOutput(request.request_id, new_token_ids)
        request.report_due = False
        return EngineCoreOutput(
            request.request_id,
            new_token_ids,
            request.status.finish_reason,
            request.stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=request.take_prompt_logprobs(),
            scheduled_time=request.scheduled_time,
            num_preemptions=request.num_preemptions,
        )

    def _append_forced(
        self, request: Request, matcher: GrammarMatcher, new_token_ids: list[int]
    ) -> None:
        if request.sampling_params.num_logprobs is not None:
            return  # every token has to have been sampled
        for token_id in matcher.take_forced_tokens():
            request.token_ids.append(token_id)
            new_token_ids.append(token_id)
            if request.slot >= 0:
                request.num_untold_tokens += 1
            else:
                self._num_queued_tokens += 1
            if request.ends_with(token_id):
                return

    def _fail_constrained(
        self, request: Request, error: Exception, is_updating: bool = False
    ) -> EngineCoreOutput:
        """End a request whose matcher has failed."""
        reason: OctavoError
        if isinstance(error, UserError):
            reason = error
        elif is_updating and _forbids_tokens(request):
            # What was sampled is allowed by neither: nothing was left.
            reason = InvalidRequestError(
                "structured_outputs and allowed_token_ids, bad_words or min_tokens together leave "
                "no token that may come next; change one of them.",
                field="structured_outputs",
            )
        else:
            _log_failed_grammar(request, error)
            text = f"The grammar of request {request.request_id} failed: {error}"
            reason = RequestFailedError(text)
        if is_updating:
            request.status = RequestStatus.FINISHED_ERROR
            self._finish(request)
        else:
            self._end(request, RequestStatus.FINISHED_ERROR)
        return failure(request.request_id, reason)

    # Ends

    def _preempt(self, step: _Step, request: Request) -> None:
        """Put a running request back in line. Its full blocks stay findable."""
        step.has_preempted = True
        step.take_back(request)
        self.blocks.retract(request)
        self.blocks.register_full_blocks(request)
        # Steps in flight may sample for it all the same. It comes back when they have.
        num_awaited = request.num_computed_tokens + 1 - len(request.token_ids)
        request.num_awaited_tokens = max(0, num_awaited)
        self._put_back(request)
        self.num_preemptions += 1

    def _put_back(self, request: Request) -> None:
        self._running.remove(request)
        self._let_go(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.is_decoding = False
        request.decode_limit = 0
        request.num_untold_tokens = 0  # it comes back with all its tokens
        request.may_cache = True
        request.status = RequestStatus.PREEMPTED
        self._num_queued_tokens += len(request.token_ids)
        self._policy.requeue(request)

    def _was_awaited(self, request: Request) -> bool:
        """True if a token came for a request that was preempted while it was in flight."""
        if request.is_finished:
            return False
        request.num_awaited_tokens -= 1
        self._num_queued_tokens += 1
        return True

    def _finish(self, request: Request) -> None:
        """Let go of a request that a token has ended; `_running` is tidied by the caller."""
        if request.slot < 0:
            self._leave_line(request)
        self._release(request)

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.slot >= 0:
            self._running.remove(request)
        else:
            self._leave_line(request)
        request.status = status
        self._release(request)

    def _leave_line(self, request: Request) -> None:
        self._policy.remove(request)
        self._num_queued_tokens -= len(request.token_ids)

    def _release(self, request: Request) -> None:
        """Give back all that an ended request holds."""
        if request.slot >= 0:
            self.blocks.register_full_blocks(request)
            self._let_go(request)
            self._policy.finish(request)
        del self._requests[request.request_id]

    def _let_go(self, request: Request) -> None:
        self.blocks.free(request)
        self._free_slots.append(request.slot)
        self._slots_to_tell.append(request.slot)
        request.slot = -1

    def _note_deadline(self, deadline: float, request_id: str) -> None:
        heapq.heappush(self._deadlines, (deadline, request_id))
        # Requests that ended before their time stay in the heap; not more than others.
        if len(self._deadlines) > 2 * len(self._requests) + 100:
            alive = self._requests.values()
            self._deadlines = [(r.deadline, r.request_id) for r in alive if r.deadline is not None]
            heapq.heapify(self._deadlines)

    # Refusals

    def _check_fits(self, request: Request) -> None:
        if request.num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt is empty; it needs a token.", field="prompt")
        is_pooled = request.pooling_params is not None
        if request.num_tokens >= self.max_model_len + is_pooled:
            if is_pooled:
                raise _text_too_long(request.num_tokens, self.max_model_len)
            raise ContextLengthError(
                f"The prompt has {request.num_tokens} tokens, but the context of "
                f"{self.max_model_len} tokens (max_model_len) must also hold at least one token of "
                f"the answer.",
                field="prompt",
            )
        blocks = self.blocks
        most_tokens = request.max_total_tokens - is_pooled
        if blocks.most_blocks_held(most_tokens) > blocks.pool.num_blocks:
            raise ContextLengthError(
                f"The prompt has {request.num_prompt_tokens} tokens and max_tokens asks for up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} more, but the whole KV "
                f"cache holds {blocks.num_tokens_alone} tokens; shorten the prompt, lower "
                f"max_tokens, or give the server more --kv-cache-memory.",
                field="max_tokens",
            )

    def _check_line(self, request: Request) -> None:
        if len(self._requests) >= self._max_num_queued_reqs:
            raise QueueFullError(
                f"{len(self._requests)} requests run or wait already, and max_num_queued_reqs is "
                f"{self._max_num_queued_reqs}; try again later, or start the server with a higher "
                f"--max-num-queued-reqs.",
                field="max_num_queued_reqs",
            )
        limit = self._max_num_queued_tokens
        if limit and len(self._policy) and self._num_queued_tokens + request.num_tokens > limit:
            raise QueueFullError(
                f"{self._num_queued_tokens} tokens wait already, this request has "
                f"{request.num_tokens}, and max_num_queued_tokens is {limit}; try again later, or "
                f"start the server with a higher --max-num-queued-tokens.",
                field="max_num_queued_tokens",
            )


def failure(request_id: str, error: OctavoError) -> EngineCoreOutput:
    """Return the one last output of a request that was refused or has failed."""
    return EngineCoreOutput(
        request_id,
        [],
        RequestStatus.FINISHED_ERROR.finish_reason,
        error=str(error),
        error_kind=type(error).__name__,
    )


def _forbids_tokens(request: Request) -> bool:
    """True if the request forbids tokens by other means than its grammar."""
    params = request.sampling_params
    return bool(params.allowed_token_ids is not None or params.bad_words or params.min_tokens)


def _tell_forced_tokens(step: _Step) -> list[tuple[int, list[int]]]:
    forced = []
    for request in step.requests:
        if request.num_untold_tokens:
            forced.append((request.slot, request.token_ids[-request.num_untold_tokens :]))
            request.num_untold_tokens = 0
    return forced


def _new_request_data(request: Request, prefix: CachedPrefix) -> NewRequestData:
    return NewRequestData(
        request.slot,
        request.request_id,
        list(request.token_ids),
        request.num_prompt_tokens,
        request.sampling_params,
        # A hole is never read, but the wire has no word for it.
        [[max(block_id, 0) for block_id in table] for table in request.block_tables],
        prefix.num_tokens,
        request.pooling_params,
    )


def _first_output(request: Request, token_id: int) -> EngineCoreOutput:
    return EngineCoreOutput(
        request.request_id,
        [token_id],
        num_cached_tokens=request.num_cached_tokens,
        prompt_logprobs=request.take_prompt_logprobs(),
        scheduled_time=request.scheduled_time,
        num_preemptions=request.num_preemptions,
    )


def _last_output(request: Request, token_id: int) -> EngineCoreOutput:
    return EngineCoreOutput(
        request.request_id,
        [token_id],
        request.status.finish_reason,
        request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        prompt_logprobs=request.take_prompt_logprobs(),
        scheduled_time=request.scheduled_time,
        num_preemptions=request.num_preemptions,
    )


def _pooled_output(request: Request, pooled: PooledOutput) -> EngineCoreOutput:
    return EngineCoreOutput(
        request.request_id,
        [],
        request.status.finish_reason,
        num_cached_tokens=request.num_cached_tokens,
        scheduled_time=request.scheduled_time,
        num_preemptions=request.num_preemptions,
        pooled=pooled,
    )


def _text_too_long(num_tokens: int, max_model_len: int) -> ContextLengthError:
    return ContextLengthError(
        f"The text has {num_tokens} tokens, but the context has {max_model_len} (max_model_len); "
        f"shorten it, or let truncate_prompt_tokens do so.",
        field="input",
    )


def _collect_prompt_logprobs(step: _Step, output: ModelRunnerOutput) -> None:
    """Keep what a step tells about prompts until their first token.

    A prompt that was preempted half-way is computed once more: what is known already of it
    is left out.
    """
    for index, entries in output.prompt_logprobs.items():
        request = step.requests[index]
        if request.prompt_logprobs is not None:
            num_known = len(request.prompt_logprobs) - step.starts[index]
            assert num_known >= 0, "a prompt's log-probabilities have a gap"
            request.prompt_logprobs += entries[num_known:]


def _with_logprobs(
    step: _Step, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]
) -> list[EngineCoreOutput]:
    by_id = {
        step.requests[index].request_id: logprobs for index, logprobs in output.logprobs.items()
    }
    return [
        msgspec.structs.replace(item, logprobs=[by_id[item.request_id]])
        if item.request_id in by_id
        else item
        for item in outputs
    ]


def _check_values(request: Request) -> None:
    """Refuse what would fail much later, in the middle of a step."""
    if request.token_ids and not 0 <= min(request.token_ids) <= max(request.token_ids) < 1 << 31:
        raise InvalidRequestError(
            f"prompt has the token id {min(request.token_ids)} or {max(request.token_ids)}; ids "
            f"are from 0 to 2147483647.",
            field="prompt",
        )
    if request.deadline is not None and not math.isfinite(request.deadline):
        raise InvalidRequestError(
            f"deadline is {request.deadline}; it must be a time.", field="deadline"
        )
    if request.num_output_tokens and request.num_tokens >= request.max_total_tokens:
        raise InvalidRequestError(
            f"the request has {request.num_output_tokens} tokens of its answer already, and "
            f"max_tokens or the context allows no more.",
            field="max_tokens",
        )


def _suspects_of(step: _Step) -> list[Suspect]:
    return [Suspect(request, len(request.token_ids)) for request in step.requests]


def _log_failed_grammar(request: Request, error: Exception) -> None:
    # Imported where it is needed, as a scheduler alone never does: 20 ms.
    import logging

    logging.getLogger(__name__).error(
        "The grammar of request %s failed", request.request_id, exc_info=error
    )
