import msgspec
import pytest

from octavo_core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo_core.engine_core import EngineCore
from octavo_core.errors import ConfigError, EngineDeadError
from octavo_core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo_core.wire import EngineCoreOutput
from support.engine_fakes import FakeExecutor, expected_output, make_request, tiny_spec


def make_engine(executor: FakeExecutor | None = None, **cache: int) -> EngineCore:
    config = EngineConfig(
        model=ModelConfig(max_model_len=256), cache=CacheConfig(block_size=4, **cache)
    )
    return EngineCore(config, tiny_spec(), executor or FakeExecutor(4, 128))


def run(engine: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_start_plans_from_the_executors_memory() -> None:
    stages: list[str] = []
    ready = make_engine().start(lambda stage, progress: stages.append(stage))
    # 1 MiB at 4 tokens × 64 bytes a block.
    assert (ready.num_blocks, ready.kv_cache_tokens, ready.max_model_len) == (4096, 16384, 256)
    assert ready.device == "fake"
    assert stages[0] == "loading"


def test_a_model_with_windows_gets_the_groups_that_its_memory_was_planned_for() -> None:
    spec = msgspec.structs.replace(
        tiny_spec(),
        num_hidden_layers=6,
        sliding_window=64,
        layer_kinds=("sliding", "sliding", "full") * 2,
    )
    config = EngineConfig(
        model=ModelConfig(max_model_len="auto"),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=300),
        scheduler=SchedulerConfig(max_num_batched_tokens=32),
    )
    engine = EngineCore(config, spec, FakeExecutor(4, 128))
    ready = engine.start(lambda stage, progress: None)
    blocks = engine.scheduler.blocks
    assert [(group.layers, group.window) for group in blocks.groups] == [
        ((0, 3), 64),
        ((1, 4), 64),
        ((2, 5), None),
    ]
    # Two groups hold up to 95 tokens in 25 blocks, and the third has the other 250.
    assert ready.max_model_len == 250 * 4 == blocks.num_tokens_alone


def test_start_refuses_a_context_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="num_gpu_blocks_override=2"):
        make_engine(num_gpu_blocks_override=2).start(lambda stage, progress: None)


def test_the_refusal_names_every_knob_with_its_value() -> None:
    executor = FakeExecutor(4, 128)
    executor.device_memory = 1 << 30
    config = EngineConfig(model=ModelConfig(max_model_len=65536), cache=CacheConfig(block_size=4))
    engine = EngineCore(config, tiny_spec(1 << 17), executor)
    with pytest.raises(ConfigError) as refused:
        engine.start(lambda stage, progress: None)
    # The fake has 1 MiB left, that is 16,384 tokens of 64 bytes.
    for knob in ("--max-model-len 16384", "--gpu-memory-utilization", "--kv-cache-memory"):
        assert knob in refused.value.message


def test_requests_run_together_as_they_would_alone() -> None:
    engine = make_engine()
    engine.start(lambda stage, progress: None)
    requests = [make_request(f"r{i}", 5 + i, max_tokens=6) for i in range(5)]
    for request in requests:
        engine.add_request(request)
    outputs = run(engine)
    for request in requests:
        tokens = [token for o in outputs[request.request_id] for token in o.new_token_ids]
        assert tokens == expected_output(request.prompt_token_ids, 6)


def test_a_refusal_comes_out_of_the_next_step() -> None:
    engine = make_engine()
    engine.start(lambda stage, progress: None)
    engine.add_request(make_request("long", 256))
    engine.add_request(make_request("good", 4, max_tokens=1))
    outputs = run(engine)
    assert outputs["long"][0].finish_reason == "error"
    assert outputs["long"][0].error_kind == "ContextLengthError"
    assert outputs["good"][0].finish_reason == "length"


def start(executor: FakeExecutor, **scheduler: int) -> EngineCore:
    config = EngineConfig(
        model=ModelConfig(max_model_len=256),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(**scheduler),
    )
    engine = EngineCore(config, tiny_spec(), executor)
    engine.start(lambda stage, progress: None)
    return engine


def text_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_a_fault_that_does_not_come_back_costs_nobody_anything() -> None:
    executor = FakeExecutor(4, 128)
    engine = start(executor)
    requests = [make_request(f"r{i}", 5, max_tokens=8) for i in range(4)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    executor.fail_next_step = True
    outputs = run(engine)
    for request in requests:
        assert outputs[request.request_id][-1].finish_reason == "length"
        # The first token came before the fault, and is not told again.
        assert (
            text_of(outputs[request.request_id])
            == (expected_output(request.prompt_token_ids, 8)[1:])
        )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_poisonous_request_is_found_and_the_others_keep_their_text(depth: int) -> None:
    executor = FakeExecutor(4, 128)
    engine = start(executor, batch_queue_size=depth)
    requests = [make_request(f"r{i}", 5 + i, max_tokens=9) for i in range(32)]
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, list[EngineCoreOutput]] = {r.request_id: [] for r in requests}
    for output in engine.step().outputs:
        outputs[output.request_id].append(output)
    executor.poison = {"r13"}
    before = executor.num_steps
    for request_id, more in run(engine).items():
        outputs[request_id] += more
    assert outputs["r13"][-1].error_kind == "RequestFailedError"
    assert "r13" in (outputs["r13"][-1].error or "")
    for request in requests:
        if request.request_id != "r13":
            expected = expected_output(request.prompt_token_ids, 9)
            assert text_of(outputs[request.request_id]) == expected
    # Five halvings, each with a group that passes or fails, and then the rest of the answers.
    assert executor.num_steps - before < 30
    assert engine.scheduler.stats().kv_cache_usage == 0


def test_a_fault_that_only_batches_meet_lets_everybody_get_on() -> None:
    """Out of memory with two requests in a step, and nothing cached to come back to."""

    class SmallExecutor(FakeExecutor):
        def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
            if len(step.slots) > 1:
                self._apply(step)
                raise RuntimeError("out of memory")
            return super()._run(step)

    config = EngineConfig(
        model=ModelConfig(max_model_len=256),
        cache=CacheConfig(block_size=4, enable_prefix_caching=False),
        scheduler=SchedulerConfig(long_prefill_token_threshold=20),
    )
    engine = EngineCore(config, tiny_spec(), SmallExecutor(4, 128))
    engine.start(lambda stage, progress: None)
    requests = [make_request(f"r{i}", 30, max_tokens=5) for i in range(3)]
    for request in requests:
        engine.add_request(request)
    outputs = run(engine)
    for request in requests:
        expected = expected_output(request.prompt_token_ids, 5)
        assert text_of(outputs[request.request_id]) == expected


def test_a_second_request_of_one_id_does_not_end_the_first() -> None:
    engine = start(FakeExecutor(4, 128))
    engine.add_request(make_request("a", 4, max_tokens=3))
    engine.add_request(make_request("a", 5, max_tokens=3))
    (*_, last) = run(engine)["a"]
    assert last.finish_reason == "length"


def test_who_leaves_before_the_refusal_is_told_nothing() -> None:
    engine = start(FakeExecutor(4, 128))
    engine.add_request(make_request("a", 300))
    engine.abort_requests(["a"])
    assert not engine.has_unfinished_requests()
    assert engine.step().outputs == []


def test_two_culprits_are_both_found() -> None:
    executor = FakeExecutor(4, 128)
    engine = start(executor)
    executor.poison = {"r1", "r6"}
    for i in range(8):
        engine.add_request(make_request(f"r{i}", 5, max_tokens=3))
    outputs = run(engine)
    failed = {name for name, of in outputs.items() if of[-1].finish_reason == "error"}
    assert failed == {"r1", "r6"}


@pytest.mark.parametrize("depth", [2, 4])
def test_scheduling_ahead_changes_no_text(depth: int) -> None:
    engine = start(FakeExecutor(4, 128), batch_queue_size=depth)
    requests = []
    for i in range(6):
        prompt = [i, 2, 3, 4, 5]
        stop = expected_output(prompt, 9)[2 + i]
        requests.append(make_request(f"r{i}", prompt, max_tokens=9, stop_token_ids=(stop,)))
        engine.add_request(requests[-1])
    outputs = run(engine)
    for i, request in enumerate(requests):
        expected = expected_output(request.prompt_token_ids, 9)
        assert (
            text_of(outputs[request.request_id]) == expected[: expected.index(expected[2 + i]) + 1]
        )


def test_an_executor_may_ask_for_steps_in_flight() -> None:
    executor = FakeExecutor(4, 128, max_concurrent_steps=2)
    engine = start(executor)
    engine.add_request(make_request("a", 4, max_tokens=5))
    engine.step()
    assert engine.scheduler.num_steps_in_flight == 1
    assert (
        text_of(run(engine)["a"]) == expected_output(make_request("a", 4).prompt_token_ids, 5)[1:]
    )


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    engine = start(FakeExecutor(4, 128), max_num_seqs=1)
    engine.add_request(make_request("late", 4, max_tokens=50, arrival_time=5.0, deadline=7.0))
    engine.add_request(make_request("waits", 4, max_tokens=50, arrival_time=5.0, deadline=7.0))
    engine.add_request(make_request("good", 4, max_tokens=2, deadline=1e12))
    outputs = run(engine)
    for name in ("late", "waits"):
        assert outputs[name][-1].error_kind == "DeadlineExceededError"
        assert "2 s after its arrival" in (outputs[name][-1].error or "")
    assert outputs["good"][-1].finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 3])
def test_the_load_is_zero_once_everybody_has_left(depth: int) -> None:
    """Case M03."""
    engine = start(FakeExecutor(4, 128), batch_queue_size=depth, max_num_seqs=20)
    names = [f"r{i}" for i in range(32)]
    for name in names:
        engine.add_request(make_request(name, 8, max_tokens=50))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (20, 12)
    engine.abort_requests(names)
    assert run(engine) == {}  # what was in flight is not told
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_dead_workers_end_the_engine() -> None:
    class DyingExecutor(FakeExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> None:
            raise EngineDeadError("worker 0 is gone")

    engine = make_engine(DyingExecutor(4, 128))
    engine.start(lambda stage, progress: None)
    engine.add_request(make_request("a", 4))
    with pytest.raises(EngineDeadError):
        engine.step()


def test_shutdown_ends_the_executor() -> None:
    executor = FakeExecutor(4, 128)
    engine = make_engine(executor)
    engine.shutdown()
    assert executor.is_shut_down
