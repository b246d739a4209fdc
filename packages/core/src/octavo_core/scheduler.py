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
from collections import deque
from collections.abc import Iterable

from octavo_core.admission import check_fits, check_values
from octavo_core.bisection import Bisection, Suspect
from octavo_core.block_manager import BlockManager
from octavo_core.config import SchedulerConfig
from octavo_core.constrained_decoding import (
    append_constrained,
    reason_of_failure,
    tell_forced_tokens,
)
from octavo_core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from octavo_core.grammar import GrammarMatcher
from octavo_core.policies import FCFSPolicy, SchedulingPolicy
from octavo_core.pooling_params import PooledOutput
from octavo_core.request import Request, RequestStatus
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_core.step import Step
from octavo_core.step_outputs import (
    collect_prompt_logprobs,
    failure,
    new_request_data,
    pooled_output,
    report,
    with_logprobs,
)
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest, SchedulerStats


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
        self._in_flight: deque[Step] = deque()  # the oldest is first
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
        check_values(request)
        check_fits(request, self.blocks, self.max_model_len)
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
            until = f"with {request.num_output_tokens} tokens generated"
            if request.pooling_params is not None:
                until = "before its text was pooled"
            error = DeadlineExceededError(
                f"The deadline of this request ({allowed:.3g} s after its arrival) has passed "
                f"{until}."
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
        step = Step(self._max_num_batched_tokens, now)
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
                self._end(request, RequestStatus.FINISHED_ERROR)
                reason = reason_of_failure(request, error, is_updating=False)
                failures.append(failure(request.request_id, reason))
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
            collect_prompt_logprobs(step, output)
        if output.pooled:
            outputs += self._finish_pooled(step, output.pooled)
            has_ended = True
        for request, token_id in zip(step.requests, output.sampled_token_ids, strict=True):
            token_ids = request.token_ids
            # Nearly always so, and then four fields are all that is looked at: 0.23 us, not 0.28.
            if len(token_ids) < request.plain_until and token_id not in request.stop_ids:
                token_ids.append(token_id)
                outputs.append(EngineCoreOutput(request.request_id, [token_id]))
            elif token_id >= 0 and (request.slot >= 0 or self._was_awaited(request)):
                outputs.append(self._update(request, token_id))
                has_ended |= request.is_finished
        if has_ended:
            self._running = [request for request in self._running if request.slot >= 0]
        if output.logprobs:
            return with_logprobs(step, output, outputs)
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
        failed = steps[0].requests
        culprit = self._bisection.accuse([Suspect(r, len(r.token_ids)) for r in failed])
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

    def _schedule_running(self, step: Step, running: list[Request]) -> None:
        requests, starts = step.requests, step.starts
        others = []
        for request in running:
            start = request.num_computed_tokens
            if start < request.decode_limit:
                requests.append(request)
                starts.append(start)
                request.num_computed_tokens = start + 1
            else:  # always so while it prefills
                others.append(request)
        # Rare, so it is looked at once and not for each of them.
        for request in requests[step.budget :]:
            request.num_computed_tokens -= 1
        del requests[step.budget :], starts[step.budget :]
        step.counts += [1] * len(requests)
        step.budget -= len(requests)
        if others:
            self._schedule_others(step, others)

    def _schedule_others(self, step: Step, others: list[Request]) -> None:
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

    def _schedule_tokens(self, step: Step, request: Request, num_tokens: int) -> None:
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

    def _admit_waiting(self, step: Step) -> None:
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

    def _admit(self, step: Step, request: Request) -> bool:
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

    def _schedule_suspects(self, step: Step) -> None:
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

    def _commit(self, step: Step) -> SchedulerOutput:
        """Put a step in the workers' terms."""
        step.effects = self.blocks.take_effects()
        step.freed_slots, self._slots_to_tell = self._slots_to_tell, []
        forced = tell_forced_tokens(step.requests) if step.has_grammars else []
        return SchedulerOutput(
            step.step_id,
            step.freed_slots,
            [new_request_data(*admitted) for admitted in step.admitted],
            [(request.slot, added) for request, added in step.added.items()],
            [request.slot for request in step.requests],
            step.counts,
            step.starts,
            step.effects.swap_out,
            step.effects.swap_in,
            forced,
        )

    def _clip(self, step: Step, request: Request, num_tokens: int) -> int:
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

    def _finish_pooled(self, step: Step, pooled: dict[int, PooledOutput]) -> list[EngineCoreOutput]:
        """End the requests whose texts are pooled; one that has ended before is left out."""
        outputs = []
        for index, result in pooled.items():
            request = step.requests[index]
            if request.is_finished:
                continue
            request.status = RequestStatus.FINISHED_STOPPED
            self._finish(request)
            outputs.append(pooled_output(request, result))
        return outputs

    # Tokens come back

    def _update(self, request: Request, token_id: int) -> EngineCoreOutput:
        """Append a token that may end the request, or with which there is more to tell."""
        if request.matcher is not None:
            return self._update_constrained(request, token_id)
        request.token_ids.append(token_id)
        if request.ends_with(token_id):
            self._finish(request)
        elif not request.report_due:
            return EngineCoreOutput(request.request_id, [token_id])
        elif request.slot >= 0:
            request.plain_until = request.max_total_tokens - 1
        request.report_due = False
        return report(request, [token_id])

    def _update_constrained(self, request: Request, token_id: int) -> EngineCoreOutput:
        """Append a token, and those that its grammar forces.

        Returns:
            The request's output, which is its last one if the grammar ends here.
        """
        num_before = len(request.token_ids)
        reason = append_constrained(request, token_id)
        new_token_ids = request.token_ids[num_before:]
        if request.slot >= 0:
            request.num_untold_tokens += len(new_token_ids) - 1
        else:
            self._num_queued_tokens += len(new_token_ids) - 1
        if reason is not None:
            request.status = RequestStatus.FINISHED_ERROR
            self._finish(request)
            return failure(request.request_id, reason)
        if request.is_finished:
            self._finish(request)
        elif not request.report_due:
            return EngineCoreOutput(request.request_id, new_token_ids)
        request.report_due = False
        return report(request, new_token_ids)

    # Ends

    def _preempt(self, step: Step, request: Request) -> None:
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
        request.plain_until = 0

    def _note_deadline(self, deadline: float, request_id: str) -> None:
        heapq.heappush(self._deadlines, (deadline, request_id))
        # Requests that ended before their time stay in the heap; not more than others.
        if len(self._deadlines) > 2 * len(self._requests) + 100:
            alive = self._requests.values()
            self._deadlines = [(r.deadline, r.request_id) for r in alive if r.deadline is not None]
            heapq.heapify(self._deadlines)

    # Refusals

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
