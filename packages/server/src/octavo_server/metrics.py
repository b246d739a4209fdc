"""What the server counts about its requests, in plain numbers.

This runs for every token, so it knows nothing of Prometheus: `octavo_server.metrics_export`
puts the numbers into that format when somebody asks for them.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from octavo_core.wire import EngineCoreRequest
from octavo_server.request_output import OutputDelta

if TYPE_CHECKING:
    from octavo_server.tracing import RequestTracer

# The bounds are those of vLLM's dashboards.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKEN_BOUNDS = tuple(digit * 10**power for power in range(8) for digit in (1, 2, 5))
SMALL_BOUNDS = (0, 1, 2, 5, 10, 20, 50)
NUM_CHOICES_BOUNDS = (1, 2, 5, 10, 20, 50, 128)

FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts of values up to each bound, and their sum.

    Args:
        bounds: Upper bounds, ascending; larger values fall in one more bucket.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def cumulative(self, limit: float | None = None) -> Iterable[tuple[float, int]]:
        """Yield bounds up to `limit` and how many values are at most that."""
        for bound, count in zip(self.bounds, itertools.accumulate(self.counts), strict=False):
            if limit is None or bound <= limit:
                yield bound, count


class _Group:
    """What the choices of one API request have in common."""

    __slots__ = ("most_tokens", "num_unfinished")

    def __init__(self, num_choices: int) -> None:
        self.num_unfinished = num_choices
        self.most_tokens = 0


class ChoiceProgress:
    """One choice on its way: when what happened to it. Times are seconds since the epoch.

    Attributes:
        is_scored: Only its prompt is of interest; the one token that the engine makes of it
            is no part of an answer.
    """

    __slots__ = (
        "arrival_time",
        "first_token_time",
        "group",
        "is_scored",
        "last_token_time",
        "num_cached_tokens",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "request_id",
        "sampling_params",
        "scheduled_time",
        "trace_headers",
    )

    def __init__(self, request: EngineCoreRequest, group: _Group, now: float) -> None:
        self.group = group
        self.is_scored = False
        self.request_id = request.request_id
        self.sampling_params = request.sampling_params
        self.trace_headers: dict[str, str] | None = None
        self.arrival_time = request.arrival_time or now
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0


class ServingMetrics:
    """Totals since the start. All methods belong to the event loop's thread.

    Attributes:
        tracer: Told of each choice that has ended, if there is one.
    """

    def __init__(self) -> None:
        self.tracer: RequestTracer | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejections: Counter[str] = Counter()
        self.time_to_first_token = Histogram(TTFT_BOUNDS)
        self.inter_token_latency = Histogram(TOKEN_LATENCY_BOUNDS)
        self.time_per_output_token = Histogram(TOKEN_LATENCY_BOUNDS)
        self.e2e_latency = Histogram(REQUEST_LATENCY_BOUNDS)
        self.queue_time = Histogram(REQUEST_LATENCY_BOUNDS)
        self.inference_time = Histogram(REQUEST_LATENCY_BOUNDS)
        self.prefill_time = Histogram(REQUEST_LATENCY_BOUNDS)
        self.decode_time = Histogram(REQUEST_LATENCY_BOUNDS)
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.generation_tokens = Histogram(TOKEN_BOUNDS)
        self.max_generation_tokens = Histogram(TOKEN_BOUNDS)
        self.params_max_tokens = Histogram(TOKEN_BOUNDS)
        self.prefill_computed_tokens = Histogram(TOKEN_BOUNDS)
        self.params_n = Histogram(NUM_CHOICES_BOUNDS)
        self.preemptions = Histogram(SMALL_BOUNDS)
        self.step_tokens = Histogram(STEP_TOKEN_BOUNDS)
        self._prefilled_in_step = 0
        self._generated_in_step = 0

    def start(
        self, requests: Sequence[EngineCoreRequest], now: float | None = None
    ) -> list[ChoiceProgress]:
        """Follow the choices of one API request, which is about to go to the engine."""
        now = time.time() if now is None else now
        group = _Group(len(requests))
        self.params_n.observe(len(requests))
        choices = [ChoiceProgress(request, group, now) for request in requests]
        if self.tracer is not None:
            headers = self.tracer.current_headers()
            for choice in choices:
                choice.trace_headers = headers
        return choices

    def add(self, progress: ChoiceProgress, delta: OutputDelta, now: float) -> None:
        """Count what one step did for a choice (2 µs)."""
        num_tokens = len(delta.token_ids)
        if delta.scheduled_time or delta.num_preemptions:
            progress.scheduled_time = progress.scheduled_time or delta.scheduled_time
            progress.num_preemptions = max(progress.num_preemptions, delta.num_preemptions)
        if num_tokens:
            if progress.num_output_tokens:
                gap = now - progress.last_token_time
                self.inter_token_latency.observe(gap if gap > 0.0 else 0.0)
            else:
                self._add_first_token(progress, delta, now)
            progress.last_token_time = now
            if not progress.is_scored:
                progress.num_output_tokens += num_tokens
                self._generated_in_step += num_tokens
        if delta.pooled is not None:
            self._add_pooled(progress, delta, now)
        if delta.finish_reason is not None:
            self.finish(progress, delta.finish_reason, now)

    def end_step(self) -> None:
        """Close the count of one step's tokens, when all of its deltas were added."""
        num_tokens = self._prefilled_in_step + self._generated_in_step
        if num_tokens:
            self.step_tokens.observe(num_tokens)
            self.num_generation_tokens += self._generated_in_step
            self._prefilled_in_step = self._generated_in_step = 0

    def finish(self, progress: ChoiceProgress, reason: str, now: float) -> None:
        """Count the end of a choice. Only answers that are complete have latencies."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        group = progress.group
        group.num_unfinished -= 1
        group.most_tokens = max(group.most_tokens, progress.num_output_tokens)
        if self.tracer is not None:
            self.tracer.end(progress, reason, now)
        if reason not in ("stop", "length"):
            return
        self._observe_times(progress, now)
        self.prompt_tokens.observe(progress.num_prompt_tokens)
        self.generation_tokens.observe(progress.num_output_tokens)
        self.prefill_computed_tokens.observe(
            progress.num_prompt_tokens - progress.num_cached_tokens
        )
        self.preemptions.observe(progress.num_preemptions)
        if progress.sampling_params.max_tokens is not None:
            max_tokens = 0 if progress.is_scored else progress.sampling_params.max_tokens
            self.params_max_tokens.observe(max_tokens)
        if not group.num_unfinished:
            self.max_generation_tokens.observe(group.most_tokens)

    def reject(self, reason: str) -> None:
        """Count a request that was turned away unread."""
        self.rejections[reason] += 1

    def _add_first_token(self, progress: ChoiceProgress, delta: OutputDelta, now: float) -> None:
        progress.first_token_time = now
        progress.num_cached_tokens = delta.num_cached_tokens
        self.time_to_first_token.observe(_seconds(progress.arrival_time, now))
        self.num_prompt_tokens += progress.num_prompt_tokens
        self.num_cached_tokens += delta.num_cached_tokens
        self._prefilled_in_step += progress.num_prompt_tokens - delta.num_cached_tokens

    def _add_pooled(self, progress: ChoiceProgress, delta: OutputDelta, now: float) -> None:
        """Count a text that was pooled. It has no token, so the times of tokens know nothing."""
        progress.first_token_time = progress.last_token_time = now
        progress.num_cached_tokens = delta.num_cached_tokens
        self.num_prompt_tokens += progress.num_prompt_tokens
        self.num_cached_tokens += delta.num_cached_tokens
        self._prefilled_in_step += progress.num_prompt_tokens - delta.num_cached_tokens

    def _observe_times(self, progress: ChoiceProgress, now: float) -> None:
        self.e2e_latency.observe(_seconds(progress.arrival_time, now))
        if not progress.first_token_time:
            return
        scheduled = progress.scheduled_time or progress.arrival_time
        first, last = progress.first_token_time, progress.last_token_time
        self.queue_time.observe(_seconds(progress.arrival_time, scheduled))
        self.prefill_time.observe(_seconds(scheduled, first))
        self.decode_time.observe(_seconds(first, last))
        self.inference_time.observe(_seconds(scheduled, last))
        if progress.num_output_tokens > 1:
            per_token = _seconds(first, last) / (progress.num_output_tokens - 1)
            self.time_per_output_token.observe(per_token)


def _seconds(start: float, end: float) -> float:
    """Return how long it took; 0 if the machine's clock was set back meanwhile."""
    return max(0.0, end - start)
