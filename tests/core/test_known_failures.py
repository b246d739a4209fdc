"""What is known to go wrong in engines of this kind, one case each."""

from __future__ import annotations

import tracemalloc

import pytest

from octavo_core.block_manager import BlockManager
from octavo_core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo_core.engine_core import EngineCore
from octavo_core.errors import ConfigError
from octavo_core.policies import load_policy
from octavo_core.scheduler import Scheduler
from octavo_core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest
from support.engine_fakes import FakeExecutor, expected_output, make_request, tiny_spec


class NotingExecutor(FakeExecutor):
    """Keeps each step it was given."""

    def __init__(self, block_size: int, num_slots: int) -> None:
        super().__init__(block_size, num_slots)
        self.steps: list[SchedulerOutput] = []

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.steps.append(scheduler_output)
        super().execute_model(scheduler_output)


def start(
    executor: FakeExecutor, num_blocks: int, max_model_len: int, **scheduler: int
) -> EngineCore:
    config = EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(block_size=executor.block_size, num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=executor.num_slots, **scheduler),
    )
    engine = EngineCore(config, tiny_spec(), executor)
    engine.start(lambda stage, progress: None)
    return engine


def step(engine: EngineCore, tokens: dict[str, list[int]]) -> list[EngineCoreOutput]:
    """Make one step, and add what it brought to `tokens`."""
    outputs = engine.step().outputs
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return outputs


def expected_of(request: EngineCoreRequest) -> list[int]:
    return expected_output(request.prompt_token_ids, request.sampling_params.max_tokens or 0)


def test_a_context_that_the_pool_can_not_hold_is_refused_at_the_start() -> None:
    """Case K01."""
    with pytest.raises(ConfigError, match="holds 320 tokens"):
        start(FakeExecutor(16, 128), num_blocks=20, max_model_len=1024)


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_one_answered() -> None:
    """Case K01."""
    engine = start(FakeExecutor(16, 128), num_blocks=64, max_model_len=1024)
    blocks = BlockManager(20, 16)  # fewer than were planned
    engine._scheduler = Scheduler(engine.config.scheduler, blocks, 1024)
    short = make_request("short", 10, max_tokens=4)
    engine.add_request(make_request("large", 500, max_tokens=1))
    engine.add_request(short)
    tokens: dict[str, list[int]] = {}
    (refusal, _) = step(engine, tokens)
    assert (refusal.request_id, refusal.error_kind) == ("large", "ContextLengthError")
    assert "500 tokens" in (refusal.error or "")
    assert "320 tokens" in (refusal.error or "")
    while engine.has_unfinished_requests():
        step(engine, tokens)
    assert tokens["short"] == expected_of(short)


@pytest.mark.parametrize("depth", [1, 2])
def test_who_was_preempted_gets_the_tokens_of_a_run_alone(depth: int) -> None:
    """Case K03."""
    executor = NotingExecutor(4, 8)
    engine = start(
        executor,
        num_blocks=40,
        max_model_len=100,
        max_num_batched_tokens=30,
        batch_queue_size=depth,
    )
    requests = [make_request(f"r{i}", 10 + i, max_tokens=64) for i in range(8)]
    for request in requests:
        engine.add_request(request)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        step(engine, tokens)
    assert engine.scheduler.num_preemptions > 0
    assert tokens == {request.request_id: expected_of(request) for request in requests}
    # A worker that puts penalties on the answer's tokens has to know where they begin.
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    entries = [new for step in executor.steps for new in step.new_requests]
    assert len(entries) > len(requests)
    for entry in entries:
        assert entry.token_ids[: entry.num_prompt_tokens] == prompts[entry.request_id]
        assert (
            entry.token_ids
            == (prompts[entry.request_id] + tokens[entry.request_id])[: len(entry.token_ids)]
        )


def test_nobody_waits_for_the_prefill_of_a_long_prompt() -> None:
    """Case K09."""
    engine = start(
        FakeExecutor(4, 8),
        num_blocks=400,
        max_model_len=1000,
        max_num_batched_tokens=40,
        long_prefill_token_threshold=20,
    )
    requests = [
        make_request("streaming", 5, max_tokens=100),
        make_request("long", 20 * 20, max_tokens=3),
        make_request("short", 10, max_tokens=3),
    ]
    tokens: dict[str, list[int]] = {}
    engine.add_request(requests[0])
    step(engine, tokens)
    for request in requests[1:]:
        engine.add_request(request)
    first_token: dict[str, int] = {}
    for index in range(30):
        outputs = step(engine, tokens)
        assert "streaming" in [output.request_id for output in outputs]
        for output in outputs:
            first_token.setdefault(output.request_id, index)
    assert first_token["short"] == 0
    assert first_token["long"] == 19  # as soon as if it were alone
    while engine.has_unfinished_requests():
        step(engine, tokens)
    assert tokens == {request.request_id: expected_of(request) for request in requests}


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair_share"])
def test_nothing_is_kept_of_requests_that_have_ended(policy: str) -> None:
    """Case K11."""
    config = SchedulerConfig(max_num_batched_tokens=100, max_num_seqs=4)
    blocks = BlockManager(50, 4, num_host_blocks=20)
    scheduler = Scheduler(config, blocks, 100, load_policy(policy))

    def serve(first: int, count: int) -> None:
        for index in range(first, first + count):
            name = f"request-{index:032}"
            request = make_request(
                name,
                20,
                max_tokens=1,
                priority=index % 3,
                tenant=f"tenant-{index % 50}",
                deadline=1e12 if index % 5 == 0 else None,
            )
            scheduler.add_request(request)
            if index % 4 == 3:
                scheduler.abort_requests([name])
                continue
            made = scheduler.schedule()
            assert made is not None
            if index % 4 == 2:
                scheduler.abort_requests([name])
            scheduler.update_from_output(ModelRunnerOutput(made.step_id, [7] * len(made.slots)))
        assert not scheduler.has_unfinished_requests()
        assert scheduler.num_waiting == 0

    serve(0, 1000)  # both pools are full by then
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        serve(1000, 2000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 2000 < 200  # bytes


def test_who_is_set_aside_holds_no_place() -> None:
    """Case K13."""
    executor = FakeExecutor(4, 4)
    # Room for two of them at their full length, so that others are set aside all the time.
    engine = start(
        executor, num_blocks=16, max_model_len=32, max_num_batched_tokens=20, batch_queue_size=2
    )
    tokens: dict[str, list[int]] = {}
    for wave in range(4):
        requests = [make_request(f"w{wave}-{i}", 6 + i % 7, max_tokens=16) for i in range(28)]
        for request in requests:
            engine.add_request(request)
        for _ in range(10):
            step(engine, tokens)
        executor.fail_next_step = True
        gone = [request for request in requests if request.request_id[-1] in "38"]
        engine.abort_requests([request.request_id for request in gone])
        for _ in range(3000):
            if not engine.has_unfinished_requests():
                break
            step(engine, tokens)
        stats = engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        for request in requests:
            if request not in gone:
                assert tokens[request.request_id] == expected_of(request)
    assert engine.scheduler.num_preemptions > 0
