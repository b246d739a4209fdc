"""What a worker tells about a prompt reaches its request whole, in order and once."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from octavo_core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo_core.engine_core import EngineCore
from octavo_core.grammar_compiler import GrammarCompiler, Work
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest
from support.engine_fakes import FakeExecutor, expected_output, make_request, tiny_spec
from support.fake_grammar import EOS_TOKEN_ID, FakeGrammarBackend


def make_engine(num_blocks: int = 200, budget: int = 64, steps_ahead: int = 1) -> EngineCore:
    config = EngineConfig(
        model=ModelConfig(max_model_len="auto"),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=8),
    )
    engine = EngineCore(config, tiny_spec(), FakeExecutor(4, 8, steps_ahead))
    engine.start(lambda stage, progress: None)
    return engine


def run(engine: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def check_report(request: EngineCoreRequest, outputs: list[EngineCoreOutput]) -> None:
    """One entry for each prompt token but the first, in the first output alone."""
    first, *rest = outputs
    prompt = request.prompt_token_ids
    assert first.prompt_logprobs is not None
    assert [entry.token_ids for entry in first.prompt_logprobs] == [[i] for i in prompt[1:]]
    assert [entry.rank for entry in first.prompt_logprobs] == list(range(1, len(prompt)))
    assert all(output.prompt_logprobs is None for output in rest)


@pytest.mark.parametrize("length", [1, 2, 9, 30])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_prompt_in_chunks(length: int, max_tokens: int) -> None:
    engine = make_engine(budget=8)
    request = make_request("a", length, max_tokens, prompt_logprobs=0)
    engine.add_request(request)
    check_report(request, run(engine)["a"])


def test_who_does_not_ask_is_told_nothing() -> None:
    engine = make_engine()
    engine.add_request(make_request("a", 9))
    assert all(output.prompt_logprobs is None for output in run(engine)["a"])


def test_a_cached_prompt_is_computed_all_the_same() -> None:
    engine = make_engine()
    prompt = list(range(40))
    engine.add_request(make_request("a", prompt))
    run(engine)
    asking = make_request("b", prompt, prompt_logprobs=0)
    engine.add_request(asking)
    outputs = run(engine)["b"]
    check_report(asking, outputs)
    assert outputs[-1].num_cached_tokens == 0
    engine.add_request(make_request("c", prompt))
    assert run(engine)["c"][-1].num_cached_tokens == 36


@pytest.mark.parametrize("steps_ahead", [1, 2])
@pytest.mark.parametrize("budget", [5, 64])
def test_each_position_once_with_preemptions_and_failing_steps(
    steps_ahead: int, budget: int
) -> None:
    engine = make_engine(num_blocks=14, budget=budget, steps_ahead=steps_ahead)
    requests = [make_request(f"r{i}", 9 + i, 12, prompt_logprobs=i % 2) for i in range(6)]
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, list[EngineCoreOutput]] = {}
    executor = engine._executor
    assert isinstance(executor, FakeExecutor)
    num_steps = 0
    while engine.has_unfinished_requests():
        num_steps += 1
        executor.fail_next_step = num_steps in (3, 60)
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.scheduler.num_preemptions > 0
    assert executor.num_injected > 0
    for request in requests:
        check_report(request, outputs[request.request_id])
        tokens = [i for output in outputs[request.request_id] for i in output.new_token_ids]
        assert tokens == expected_output(request.prompt_token_ids, 12)


def test_a_request_that_comes_back_with_tokens_was_reported_on_before() -> None:
    engine = make_engine()
    prompt = list(range(40))
    engine.add_request(make_request("a", prompt))
    run(engine)
    resumed = make_request(
        "b", prompt, prompt_logprobs=0, output_token_ids=expected_output(prompt, 1)
    )
    engine.add_request(resumed)
    hits = engine.stats().prefix_cache_hits
    assert all(output.prompt_logprobs is None for output in run(engine)["b"])
    assert engine.stats().prefix_cache_hits - hits == 40  # and so it may use the cache


def test_a_request_under_a_grammar_is_reported_on_too() -> None:
    def compile_now(work: Work) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work())
        return future

    config = EngineConfig(
        model=ModelConfig(max_model_len=100),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=100),
        scheduler=SchedulerConfig(max_num_batched_tokens=6, max_num_seqs=4),
    )
    grammars = GrammarCompiler(FakeGrammarBackend(), compile_now, max_wait=0)
    engine = EngineCore(config, tiny_spec(), FakeExecutor(4, 4), grammars)
    engine.start(lambda stage, progress: None)
    request = make_request(
        "a",
        15,
        max_tokens=9,
        prompt_logprobs=0,
        structured_outputs=StructuredOutputsParams(regex="1"),
        eos_token_ids=(EOS_TOKEN_ID,),
    )
    engine.add_request(request)
    outputs = run(engine)["a"]
    check_report(request, outputs)
    assert outputs[0].scheduled_time > 0
    assert outputs[-1].scheduled_time == outputs[0].scheduled_time
