"""One engine on a virtual clock: the real scheduler, and a cost model for a device."""

from __future__ import annotations

from octavo_core.errors import UserError
from octavo_core.scheduler import Scheduler
from octavo_core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo_core.simulator.cost_model import CostModel, step_load
from octavo_core.simulator.measurements import Measurements
from octavo_core.wire import EngineCoreRequest

# The made-up answer. No stop token is set, so that it means nothing to the scheduler.
_TOKEN = 0


class _Answer:
    """What is measured of a request in flight."""

    __slots__ = ("arrival", "first_token_at", "last_token_at", "num_output_tokens", "slot")

    def __init__(self, arrival: float, num_output_tokens: int) -> None:
        self.arrival = arrival
        self.num_output_tokens = num_output_tokens
        self.first_token_at = -1.0
        self.last_token_at = -1.0  # kept only while it does not decode
        self.slot = -1


class Replica:
    """Computes steps in no time, and says how long each would take.

    A decode step costs a handful of operations here however many requests it has: a
    request's gap between two tokens is the time between two steps, so gaps are counted
    for all decoding requests at once, and only those that enter, leave or miss a step are
    looked at one by one.

    Args:
        scheduler: This replica's own.
        cost_model: How long a step takes.
        measurements: What all replicas count.
    """

    def __init__(
        self, scheduler: Scheduler, cost_model: CostModel, measurements: Measurements
    ) -> None:
        self.scheduler = scheduler
        self.num_unfinished = 0
        self.num_routed = 0
        self._cost_model = cost_model
        self._measurements = measurements
        self._answers: dict[str, _Answer] = {}
        self._by_slot: dict[int, _Answer] = {}
        self._prefilling: dict[int, int] = {}  # slot to its last known token's end
        self._decoding: set[int] = set()
        # Decoding slots that the last step left out, and the time of their last token.
        # All others got a token at `_last_end`.
        self._stalled: dict[int, float] = {}
        self._last_end = 0.0
        self._step: SchedulerOutput | None = None
        self._sampled: list[int] = []
        self._entering: list[int] = []
        self._num_gaps = 0
        self._stalls_ended: list[float] = []
        self._end = 0.0
        self._tokens = [_TOKEN] * 64

    @property
    def has_work(self) -> bool:
        """True while a request is not finished."""
        return self.num_unfinished > 0

    @property
    def is_computing(self) -> bool:
        """True between `start_step` and `finish_step`."""
        return self._step is not None

    def add_request(self, request: EngineCoreRequest, now: float) -> bool:
        """Take a request that arrives at `now`. Returns False if the scheduler refuses it."""
        self.num_routed += 1
        try:
            self.scheduler.add_request(request)
        except UserError as error:
            self._measurements.refusals[type(error).__name__] += 1
            return False
        self._answers[request.request_id] = _Answer(now, self._answer_length(request))
        self.num_unfinished += 1
        return True

    def start_step(self, now: float) -> float | None:
        """Schedule a step at `now`; return when it ends, or None if there is nothing to do."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        num_rows = len(step.slots)
        for slot in step.freed_slots:
            self._leave(slot)
        for new in step.new_requests:
            answer = self._answers[new.request_id]
            answer.slot = new.slot
            self._by_slot[new.slot] = answer
            self._prefilling[new.slot] = len(new.token_ids)
        self._entering = []
        if num_rows > len(self._tokens):
            self._tokens = [_TOKEN] * (2 * num_rows)
        sampled = self._tokens[:num_rows]
        num_sampled = num_rows
        num_prefilling = 0
        if self._prefilling:
            num_prefilling, num_sampled = self._sample_prompts(step, sampled)
        self._count_gaps(step, num_rows - num_prefilling)
        load = step_load(step, num_sampled)
        seconds = self._cost_model.seconds(load)
        self._step, self._sampled, self._end = step, sampled, now + seconds
        self._measure_step(now, seconds, num_sampled, load.num_tokens, num_rows)
        return self._end

    def finish_step(self) -> None:
        """Complete the step that `start_step` began, at the time that it returned."""
        step, end = self._step, self._end
        assert step is not None, "no step is being computed"
        self._step = None
        outputs = self.scheduler.update_from_output(ModelRunnerOutput(step.step_id, self._sampled))
        measurements = self._measurements
        gaps = measurements.inter_token_latency
        if self._num_gaps:
            gaps.add(end - self._last_end, self._num_gaps)
        for last in self._stalls_ended:
            gaps.add(end - last)
        for slot in self._entering:
            answer = self._by_slot[slot]
            self._decoding.add(slot)
            if answer.first_token_at < 0:
                answer.first_token_at = end
                measurements.time_to_first_token.add(end - answer.arrival)
            else:  # it was preempted, and is back
                gaps.add(end - answer.last_token_at)
        self._last_end = end
        for output in outputs:
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason, end)
        if end > measurements.end:
            measurements.end = end

    # Phases of start_step()

    def _sample_prompts(self, step: SchedulerOutput, sampled: list[int]) -> tuple[int, int]:
        """Find the prompts in a step, and those that end in it.

        Returns:
            How many rows are prompts, and how many rows of the step sample a token.
        """
        prefilling = self._prefilling
        counts, starts = step.num_scheduled_tokens, step.num_computed_tokens
        num_rows = num_sampled = 0
        for row, slot in enumerate(step.slots):
            length = prefilling.get(slot)
            if length is None:
                num_sampled += 1
                continue
            num_rows += 1
            if starts[row] + counts[row] < length:
                sampled[row] = -1
                continue
            num_sampled += 1
            del prefilling[slot]
            self._entering.append(slot)
        return num_rows, num_sampled

    def _count_gaps(self, step: SchedulerOutput, num_decoding_rows: int) -> None:
        """Note whose gap ends with this step, before those that enter it decode too."""
        stalled = self._stalled
        self._stalls_ended = []
        if not stalled and num_decoding_rows == len(self._decoding):
            self._num_gaps = num_decoding_rows
            return
        present = self._decoding.intersection(step.slots)
        for slot in self._decoding - present:
            stalled.setdefault(slot, self._last_end)
        self._stalls_ended = [stalled.pop(slot) for slot in sorted(present & stalled.keys())]
        self._num_gaps = len(present) - len(self._stalls_ended)

    def _answer_length(self, request: EngineCoreRequest) -> int:
        room = self.scheduler.max_model_len - len(request.prompt_token_ids)
        max_tokens = request.sampling_params.max_tokens
        return room if max_tokens is None else min(max_tokens, room)

    def _leave(self, slot: int) -> None:
        """Take a request out of a slot that the scheduler freed: it ended or was preempted."""
        answer = self._by_slot.pop(slot, None)
        if answer is None:
            return
        answer.slot = -1
        self._prefilling.pop(slot, None)
        if slot in self._decoding:
            self._decoding.remove(slot)
            answer.last_token_at = self._stalled.pop(slot, self._last_end)

    def _measure_step(
        self, now: float, seconds: float, num_sampled: int, num_tokens: int, num_rows: int
    ) -> None:
        stats = self.scheduler.stats()
        measurements = self._measurements
        measurements.num_steps += 1
        measurements.num_output_tokens += num_sampled
        measurements.num_computed_tokens += num_tokens
        measurements.num_rows += num_rows
        measurements.busy_seconds += seconds
        usage = stats.kv_cache_usage
        measurements.usage_seconds += usage * seconds
        if usage > measurements.peak_usage:
            measurements.peak_usage = usage
        measurements.timeline.add(
            now, seconds, num_sampled, stats.num_running, stats.num_waiting, usage
        )

    def _finish(self, request_id: str, reason: str, end: float) -> None:
        answer = self._answers.pop(request_id)
        self.num_unfinished -= 1
        if answer.slot >= 0:
            self._decoding.discard(answer.slot)
            self._prefilling.pop(answer.slot, None)
            self._stalled.pop(answer.slot, None)
            del self._by_slot[answer.slot]
        measurements = self._measurements
        if reason not in ("stop", "length"):
            measurements.num_failed += 1
            return
        measurements.num_finished += 1
        measurements.end_to_end.add(end - answer.arrival)
        if answer.num_output_tokens > 1:
            measurements.time_per_output_token.add(
                (end - answer.first_token_at) / (answer.num_output_tokens - 1)
            )
