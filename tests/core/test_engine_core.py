import pytest

from octavo_core.config import CacheConfig, EngineConfig, ModelConfig
from octavo_core.engine_core import EngineCore
from octavo_core.errors import ConfigError, EngineDeadError
from octavo_core.scheduler_output import SchedulerOutput
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


def test_start_refuses_a_context_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="num_gpu_blocks_override=2"):
        make_engine(num_gpu_blocks_override=2).start(lambda stage, progress: None)


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


def test_a_failed_step_costs_its_requests_only() -> None:
    executor = FakeExecutor(4, 128)
    engine = make_engine(executor)
    engine.start(lambda stage, progress: None)
    engine.add_request(make_request("bad", 4))
    executor.fail_next_step = True
    (output,) = engine.step().outputs
    assert (output.request_id, output.error_kind) == ("bad", "RequestFailedError")
    engine.add_request(make_request("good", 4, max_tokens=2))
    assert run(engine)["good"][-1].finish_reason == "length"
    assert engine.scheduler.stats().kv_cache_usage == 0


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
