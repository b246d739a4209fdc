"""Each test is a story of a few requests."""

from typing import Any

import pytest

from octavo_core.block_manager import BlockManager, CachedPrefix
from octavo_core.config import SchedulerConfig
from octavo_core.errors import ContextLengthError, InvalidRequestError, QueueFullError
from octavo_core.request import Request
from octavo_core.scheduler import Scheduler
from octavo_core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo_core.wire import EngineCoreOutput
from support.engine_fakes import make_request


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    budget: int = 100,
    max_num_seqs: int = 8,
    max_model_len: int = 1000,
    long_prefill_token_threshold: int = 0,
    **limits: int,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=long_prefill_token_threshold,
        **limits,
    )
    return Scheduler(config, BlockManager(num_blocks, block_size), max_model_len)


def finish_step(
    scheduler: Scheduler, step: SchedulerOutput, token_id: int = 7
) -> list[EngineCoreOutput]:
    """Answer a step: a token for each request whose known tokens are all computed."""
    known = {request.slot: request.num_tokens for request in scheduler.running}
    sampled = [
        token_id if start + count == known[slot] else -1
        for slot, count, start in zip(
            step.slots, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        )
    ]
    return scheduler.update_from_output(ModelRunnerOutput(step.step_id, sampled))


def run_step(scheduler: Scheduler, token_id: int = 7) -> dict[str, EngineCoreOutput]:
    step = scheduler.schedule()
    assert step is not None
    outputs = finish_step(scheduler, step, token_id)
    return {output.request_id: output for output in outputs}


def test_a_request_is_prefilled_then_decodes_until_its_length() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 10, max_tokens=3))
    step = scheduler.schedule()
    assert (step.slots, step.num_scheduled_tokens, step.num_computed_tokens) == ([0], [10], [0])
    assert len(step.new_requests[0].block_tables[0]) == 3
    (first,) = finish_step(scheduler, step)
    assert (first.new_token_ids, first.finish_reason) == ([7], None)
    step = scheduler.schedule()
    assert (step.num_scheduled_tokens, step.num_computed_tokens) == ([1], [10])
    finish_step(scheduler, step)
    assert run_step(scheduler)["a"].finish_reason == "length"
    assert not scheduler.has_unfinished_requests()
    assert scheduler.blocks.pool.num_used == 0


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add_request(make_request("old", 4, max_tokens=50))
    run_step(scheduler)
    scheduler.add_request(make_request("long", 20, max_tokens=5))
    for chunk in (7, 7, 6):
        step = scheduler.schedule()
        assert step.num_scheduled_tokens == [1, chunk]
        outputs = finish_step(scheduler, step)
        assert outputs[0].request_id == "old"
    assert [output.request_id for output in outputs] == ["old", "long"]


def test_a_threshold_lets_a_short_prompt_pass_a_long_one() -> None:
    scheduler = make_scheduler(budget=16, long_prefill_token_threshold=8)
    scheduler.add_request(make_request("long", 80, max_tokens=1))
    scheduler.add_request(make_request("short", 6, max_tokens=1))
    assert run_step(scheduler)["short"].finish_reason == "length"


def test_decodes_go_before_prefills_of_older_requests() -> None:
    scheduler = make_scheduler(budget=8, long_prefill_token_threshold=6)
    scheduler.add_request(make_request("long", 60, max_tokens=1))
    scheduler.add_request(make_request("short", 2, max_tokens=9))
    run_step(scheduler)
    step = scheduler.schedule()
    assert step.slots == [1, 0]
    assert step.num_scheduled_tokens == [1, 6]


def test_slots_bound_the_running_requests_and_are_reused_lowest_first() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(make_request(name, 4, max_tokens=2))
    assert [new.request_id for new in scheduler.schedule().new_requests] == ["a", "b"]
    assert scheduler.num_waiting == 1


def test_requests_that_arrive_together_share_a_cold_prefix() -> None:
    scheduler = make_scheduler()
    prefix = list(range(16))
    scheduler.add_request(make_request("a", [*prefix, 50]))
    scheduler.add_request(make_request("b", [*prefix, 60]))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == [17, 1]
    first, second = (new.block_tables[0] for new in step.new_requests)
    assert first[:4] == second[:4]
    outputs = finish_step(scheduler, step)
    assert [output.num_cached_tokens for output in outputs] == [0, 16]


def test_when_blocks_run_out_the_newest_is_preempted_and_both_finish() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4, max_model_len=12)
    scheduler.add_request(make_request("old", 4, max_tokens=6))
    scheduler.add_request(make_request("new", 4, max_tokens=6))
    run_step(scheduler)  # one block each
    step = scheduler.schedule()  # both want a second one, and one is left
    assert step.slots == [0]
    assert scheduler.num_preemptions == 1
    assert scheduler.num_waiting == 1
    finish_step(scheduler, step)
    texts: dict[str, int] = {"old": 2, "new": 1}
    while scheduler.has_unfinished_requests():
        for request_id, output in run_step(scheduler).items():
            texts[request_id] += len(output.new_token_ids)
    assert texts == {"old": 6, "new": 6}


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    scheduler.add_request(make_request("old", 4, max_tokens=9))
    scheduler.add_request(make_request("new", 7, max_tokens=3))
    run_step(scheduler)
    run_step(scheduler)  # old takes a second block, new fills its second one
    step = scheduler.schedule()  # new wants a third one: it preempts itself
    assert step.slots == [0]
    finish_step(scheduler, step)
    step = scheduler.schedule()
    while not step.new_requests:
        finish_step(scheduler, step)
        step = scheduler.schedule()
    resumed = step.new_requests[0]
    assert resumed.request_id == "new"
    assert resumed.num_computed_tokens >= 4
    assert len(resumed.token_ids) == 9
    assert resumed.num_prompt_tokens == 7


def test_a_stop_token_counts_from_min_tokens_on() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(
        make_request("a", 4, max_tokens=9, min_tokens=3, stop_token_ids=(5,), eos_token_ids=(6,))
    )
    assert run_step(scheduler, token_id=5)["a"].finish_reason is None
    assert run_step(scheduler, token_id=6)["a"].finish_reason is None
    output = run_step(scheduler, token_id=5)["a"]
    assert (output.finish_reason, output.stop_reason) == ("stop", 5)


def test_end_of_sequence_has_no_stop_reason_and_can_be_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=2, eos_token_ids=(6,)))
    scheduler.add_request(make_request("b", 4, max_tokens=2, eos_token_ids=(6,), ignore_eos=True))
    outputs = run_step(scheduler, token_id=6)
    assert (outputs["a"].finish_reason, outputs["a"].stop_reason) == ("stop", None)
    assert outputs["b"].finish_reason is None


def test_abort_in_any_state_gives_everything_back() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("running", 8, max_tokens=9))
    run_step(scheduler)
    scheduler.add_request(make_request("waiting", 8))
    scheduler.abort_requests(["waiting", "running", "never seen"])
    assert not scheduler.has_unfinished_requests()
    assert scheduler.num_waiting == 0
    assert scheduler.stats().kv_cache_usage == 0
    scheduler.add_request(make_request("next", 8, max_tokens=1))
    step = scheduler.schedule()
    assert step.freed_slots == [0]
    assert step.new_requests[0].slot == 0


def test_a_waiting_request_whose_client_left_is_never_computed() -> None:
    """Case K07."""
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "abc":
        scheduler.add_request(make_request(name, 4, max_tokens=1))
    run_step(scheduler)
    scheduler.abort_requests(["b"])
    assert [new.request_id for new in scheduler.schedule().new_requests] == ["c"]


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=4, max_model_len=1000)
    with pytest.raises(ContextLengthError, match="holds 40 tokens") as refused:
        scheduler.add_request(make_request("a", 30, max_tokens=11))
    assert "--kv-cache-memory" in refused.value.message
    with pytest.raises(ContextLengthError, match="1000 tokens"):
        scheduler.add_request(make_request("b", 1000))
    with pytest.raises(InvalidRequestError, match="empty"):
        scheduler.add_request(make_request("c", []))
    assert not scheduler.has_unfinished_requests()
    scheduler.add_request(make_request("d", 30, max_tokens=10))
    assert run_step(scheduler)["d"].new_token_ids == [7]


def test_an_id_can_be_used_again_only_when_its_request_has_ended() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=1))
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add_request(make_request("a", 4))
    run_step(scheduler)
    scheduler.add_request(make_request("a", 4))


def test_a_request_whose_steps_fail_even_alone_is_ended_and_no_other() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    prompt = list(range(9))
    scheduler.add_request(make_request("poisoned", prompt))
    scheduler.add_request(make_request("next", prompt, max_tokens=1))
    assert scheduler.schedule() is not None
    assert scheduler.roll_back("boom") == []  # it gets a second chance
    assert scheduler.schedule() is not None
    (output,) = scheduler.roll_back("boom")
    assert (output.request_id, output.finish_reason) == ("poisoned", "error")
    assert (output.error or "").endswith("boom")
    assert output.error_kind == "RequestFailedError"
    output = run_step(scheduler)["next"]
    assert output.finish_reason == "length"
    assert output.num_cached_tokens == 0  # the failed step's blocks were not believed


def test_steps_may_be_scheduled_ahead_of_their_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 6, max_tokens=3))
    steps = [scheduler.schedule() for _ in range(3)]
    assert [step.num_computed_tokens for step in steps if step] == [[0], [6], [7]]
    assert scheduler.schedule() is None  # its last token is in flight
    for step in steps:
        assert step is not None
        (output,) = scheduler.update_from_output(ModelRunnerOutput(step.step_id, [7]))
    assert output.finish_reason == "length"
    assert scheduler.blocks.pool.num_used == 0


def test_what_was_scheduled_ahead_of_an_end_is_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 6, max_tokens=30, stop_token_ids=(5,)))
    one, two = scheduler.schedule(), scheduler.schedule()
    assert one is not None
    assert two is not None
    (output,) = scheduler.update_from_output(ModelRunnerOutput(one.step_id, [5]))
    assert output.finish_reason == "stop"
    assert scheduler.update_from_output(ModelRunnerOutput(two.step_id, [9])) == []
    assert not scheduler.has_unfinished_requests()


def test_a_token_in_flight_reaches_a_request_that_was_preempted() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4, max_model_len=12)
    scheduler.add_request(make_request("old", 4, max_tokens=6))
    scheduler.add_request(make_request("new", 4, max_tokens=6))
    one = scheduler.schedule()
    two = scheduler.schedule()  # before the tokens are back: "new" has to go
    assert one is not None
    assert two is not None
    assert (two.slots, scheduler.num_preemptions) == ([0], 1)
    assert scheduler.schedule() is not None  # and does not come back before its token does
    assert scheduler.num_waiting == 1
    outputs = scheduler.update_from_output(ModelRunnerOutput(one.step_id, [8, 9]))
    assert [(output.request_id, output.new_token_ids) for output in outputs] == [
        ("old", [8]),
        ("new", [9]),
    ]


def test_the_line_has_an_end() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=3, max_num_queued_tokens=30)
    scheduler.add_request(make_request("runs", 20, max_tokens=5))
    run_step(scheduler)
    scheduler.add_request(make_request("first", 25))
    with pytest.raises(QueueFullError, match="25 tokens wait already, this request has 6"):
        scheduler.add_request(make_request("many tokens", 6))
    scheduler.add_request(make_request("second", 5))
    with pytest.raises(QueueFullError, match="3 requests run or wait already"):
        scheduler.add_request(make_request("third", 1))
    # Who comes from an engine that is gone was let in before.
    scheduler.add_request(make_request("from before", 50, is_resumed=True))
    scheduler.abort_requests(["first", "from before"])
    scheduler.add_request(make_request("third", 1))
    assert scheduler.stats().num_waiting_tokens == 6


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 1 << 32]}, "prompt"),
        ({"prompt": [1], "deadline": float("nan")}, "deadline"),
        ({"prompt": [1], "deadline": float("inf")}, "deadline"),
        ({"prompt": [1], "max_tokens": 2, "output_token_ids": [3, 4]}, "max_tokens"),
    ],
)
def test_values_that_would_fail_later_are_refused(fields: dict[str, Any], field: str) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError) as refused:
        scheduler.add_request(make_request("a", **fields))
    assert refused.value.field == field
    assert not scheduler.has_unfinished_requests()


def test_deadlines_of_requests_that_have_ended_are_not_kept() -> None:
    scheduler = make_scheduler()
    for index in range(5000):
        scheduler.add_request(make_request(f"r{index}", 4, max_tokens=1, deadline=1e15))
        scheduler.abort_requests([f"r{index}"])
    assert len(scheduler._deadlines) <= 110


def test_a_long_prompt_leaves_half_of_a_step_to_those_who_wait() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add_request(make_request("long", 100, max_tokens=1))
    assert scheduler.schedule().num_scheduled_tokens == [16]  # type: ignore[union-attr]
    scheduler.update_from_output(ModelRunnerOutput(1, [-1]))
    scheduler.add_request(make_request("short", 8, max_tokens=1))
    assert run_step(scheduler)["short"].finish_reason == "length"
    assert scheduler.schedule().num_scheduled_tokens == [16]  # type: ignore[union-attr]


def test_a_head_without_blocks_is_not_looked_up_again_and_again() -> None:
    scheduler = make_scheduler(num_blocks=14, block_size=4, max_model_len=48)
    prefix = list(range(24))
    scheduler.add_request(make_request("runs", [*prefix, 1], max_tokens=12))
    run_step(scheduler)
    scheduler.add_request(make_request("blocked", [*range(100, 140)], max_tokens=2))
    lookups = 0
    find = scheduler.blocks.find_cached_prefix

    def count(request: Request) -> CachedPrefix:
        nonlocal lookups
        lookups += 1
        return find(request)

    scheduler.blocks.find_cached_prefix = count  # type: ignore[method-assign]
    reasons = {}
    while scheduler.has_unfinished_requests():
        for name, output in run_step(scheduler).items():
            reasons[name] = output.finish_reason
    assert reasons == {"runs": "length", "blocked": "length"}
    assert lookups == 2


def test_a_large_request_may_wait_alone_whatever_the_limit() -> None:
    scheduler = make_scheduler(max_num_queued_tokens=10)
    scheduler.add_request(make_request("large", 50))
    assert scheduler.num_waiting == 1


def test_a_reset_cache_is_not_filled_again_by_those_who_were_there() -> None:
    scheduler = make_scheduler()
    prompt = list(range(9))
    scheduler.add_request(make_request("old", prompt, max_tokens=20))
    run_step(scheduler)
    scheduler.reset_prefix_cache()
    for _ in range(12):
        run_step(scheduler)
    assert scheduler.blocks.pool.num_cached == 0
    scheduler.add_request(make_request("new", prompt, max_tokens=1))
    assert run_step(scheduler)["new"].num_cached_tokens == 0


def test_a_preempted_request_comes_back_from_the_host() -> None:
    blocks = BlockManager(4, 4, num_host_blocks=8)
    config = SchedulerConfig(max_num_batched_tokens=100, max_num_seqs=8)
    scheduler = Scheduler(config, blocks, 16)
    scheduler.add_request(make_request("old", 4, max_tokens=12))
    scheduler.add_request(make_request("new", 8, max_tokens=8))
    swapped_out, swapped_in, lengths = 0, 0, {"old": 0, "new": 0}
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        assert step is not None
        swapped_out += len(step.blocks_to_swap_out)
        swapped_in += len(step.blocks_to_swap_in)
        for output in finish_step(scheduler, step):
            lengths[output.request_id] += len(output.new_token_ids)
    assert lengths == {"old": 12, "new": 8}
    assert swapped_out >= swapped_in >= 1
    assert scheduler.stats().host_cache_hits == 4 * swapped_in


def test_a_resumed_request_goes_on_after_the_tokens_it_has() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 6, max_tokens=3)
    from_before = type(request)(
        request.request_id,
        request.prompt_token_ids,
        request.sampling_params,
        output_token_ids=[1, 2],
    )
    scheduler.add_request(from_before)
    output = run_step(scheduler)["a"]
    assert (output.new_token_ids, output.finish_reason) == ([7], "length")


def test_a_deadline_is_that_of_one_request_and_not_of_its_id() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, deadline=100.0))
    scheduler.abort_requests(["a"])
    scheduler.add_request(make_request("a", 4, deadline=200.0))
    assert scheduler.expire(now=150.0) == []
    (output,) = scheduler.expire(now=200.0)
    assert (output.request_id, output.error_kind) == ("a", "DeadlineExceededError")


def test_a_few_blocks_are_kept_back_for_those_that_run() -> None:
    """One of 100, so that the newcomer is not what drives the first one out at once."""
    scheduler = make_scheduler(num_blocks=100, block_size=4, budget=400)
    scheduler.add_request(make_request("first", 40 * 4, max_tokens=9))
    run_step(scheduler)
    scheduler.add_request(make_request("newcomer", 59 * 4, max_tokens=9))
    run_step(scheduler)  # the first one takes its 41st block
    assert scheduler.num_waiting == 1
    scheduler.abort_requests(["newcomer"])
    scheduler.add_request(make_request("smaller", 58 * 4, max_tokens=9))
    run_step(scheduler)
    assert scheduler.num_waiting == 0


def test_a_suspect_is_not_cleared_before_it_got_past_where_it_failed() -> None:
    """Its ninth token fails; two chunks of four bring it just before that."""
    config = SchedulerConfig(max_num_batched_tokens=4)
    scheduler = Scheduler(config, BlockManager(100, 4, enable_prefix_caching=False), 100)
    scheduler.add_request(make_request("poison", 8))
    ends: list[EngineCoreOutput] = []
    for _ in range(12):
        step = scheduler.schedule()
        if step is None:
            break
        if step.num_computed_tokens == [8]:
            ends += scheduler.roll_back("boom")
        else:
            finish_step(scheduler, step)
    assert [(end.request_id, end.error_kind) for end in ends] == [("poison", "RequestFailedError")]


def test_a_long_prompt_takes_the_whole_step_while_the_next_in_line_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=20, block_size=4, budget=16, max_model_len=80)
    scheduler.add_request(make_request("long", 48))
    scheduler.add_request(make_request("larger", 76))
    counts = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step is not None
        counts += step.num_scheduled_tokens
        finish_step(scheduler, step)
    assert counts == [8, 16, 16, 8]


def test_who_was_refused_is_admitted_once_another_has_computed_more_of_its_prefix() -> None:
    """No block became free meanwhile: one that was held already has become a hit."""
    scheduler = make_scheduler(num_blocks=12, block_size=4, long_prefill_token_threshold=6)
    scheduler.add_request(make_request("other", 13, max_tokens=20))
    for _ in range(3):
        run_step(scheduler)
    shared = list(range(32))
    scheduler.add_request(make_request("first", shared[:24]))
    scheduler.add_request(make_request("second", shared))
    run_step(scheduler)  # six tokens of first, in two blocks: second lacks one
    assert [request.request_id for request in scheduler.running] == ["other", "first"]
    free = scheduler.blocks.pool.num_free
    step = scheduler.schedule()
    assert step is not None
    assert [(new.request_id, new.num_computed_tokens) for new in step.new_requests] == [
        ("second", 12)
    ]
    assert scheduler.blocks.pool.num_free < free


def test_a_request_tells_when_it_ran_first_and_how_often_it_was_preempted() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4, max_model_len=12)
    scheduler.add_request(make_request("old", 4, max_tokens=6))
    scheduler.add_request(make_request("new", 4, max_tokens=6))
    told: dict[str, list[tuple[float, int]]] = {"old": [], "new": []}
    now = 100.0
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule(now)
        assert step is not None
        for output in finish_step(scheduler, step):
            told[output.request_id].append((output.scheduled_time, output.num_preemptions))
        now += 1.0
    assert scheduler.num_preemptions == 1
    # With the first token, with the first after each time in line, and with the last.
    assert told["old"] == [(100.0, 0), *[(0.0, 0)] * 4, (100.0, 0)]
    assert [report for report in told["new"] if report != (0.0, 0)] == [
        (100.0, 0),
        (100.0, 1),
        (100.0, 1),
    ]


def test_the_steps_of_a_pipeline_share_the_requests() -> None:
    config = SchedulerConfig(max_num_batched_tokens=100, max_num_seqs=8)
    scheduler = Scheduler(config, BlockManager(100, 4), 1000, num_stages=2)
    for name in "abcd":
        scheduler.add_request(make_request(name, 5, max_tokens=9))
    step = scheduler.schedule()
    assert step is not None
    assert len(step.slots) == 4  # prompts
    assert scheduler.schedule() is None  # everybody's next token is in flight
    finish_step(scheduler, step)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert (first.slots, second.slots) == ([0, 1], [2, 3])
    assert scheduler.schedule() is None
    known = {request.slot: request.num_tokens for request in scheduler.running}
    for step, slots in ((first, [0, 1]), (second, [2, 3])):
        assert [known[slot] for slot in slots] == [6, 6]
        output = ModelRunnerOutput(step.step_id, [7, 7])
        scheduler.update_from_output(output)
        again = scheduler.schedule()
        assert again is not None
        assert again.slots == slots


def test_one_request_alone_goes_through_a_pipeline_step_by_step() -> None:
    config = SchedulerConfig(max_num_batched_tokens=4, max_num_seqs=8)
    scheduler = Scheduler(config, BlockManager(100, 4), 1000, num_stages=3)
    scheduler.add_request(make_request("a", 12, max_tokens=2))
    steps = [scheduler.schedule() for _ in range(4)]
    # A prompt's pieces need no token, so each stage has one; then it waits.
    assert [step and step.num_scheduled_tokens for step in steps] == [[4], [4], [4], None]


def test_decodes_beyond_the_budget_wait_for_the_next_step() -> None:
    """With more steps in flight than stages, a stage's share can be more than a step holds."""
    config = SchedulerConfig(max_num_batched_tokens=2, max_num_seqs=8)
    scheduler = Scheduler(config, BlockManager(100, 4), 1000, num_stages=2)
    for number in range(6):
        scheduler.add_request(make_request(f"request {number}", 1, max_tokens=3))
    for step in [scheduler.schedule() for _ in range(3)]:
        scheduler.update_from_output(ModelRunnerOutput(step.step_id, [7, 7]))
    step = scheduler.schedule()
    assert (step.slots, step.num_computed_tokens) == ([0, 1], [1, 1])
    assert [request.num_computed_tokens for request in scheduler.running] == [2, 2, 1, 1, 1, 1]
    scheduler.update_from_output(ModelRunnerOutput(step.step_id, [7, 7]))
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    assert scheduler.blocks.pool.num_used == 0
