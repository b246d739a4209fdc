"""Stories of requests under a grammar; the simulation has them at random."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from octavo_core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo_core.engine_core import EngineCore
from octavo_core.grammar_compiler import GrammarCompiler, Work
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_core.wire import EngineCoreRequest
from support.engine_fakes import (
    FakeExecutor,
    expected_constrained_output,
    expected_output,
    make_request,
    tiny_spec,
)
from support.fake_grammar import EOS_TOKEN_ID, FakeGrammarBackend, FakeMatcher


class Engine:
    """An engine whose grammars are compiled when the test says so."""

    def __init__(self, depth: int = 1, num_slots: int = 4) -> None:
        config = EngineConfig(
            model=ModelConfig(max_model_len=100),
            cache=CacheConfig(block_size=4, num_gpu_blocks_override=100),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=32, max_num_seqs=num_slots, batch_queue_size=depth
            ),
        )
        self.work: list[tuple[Work, Future[Any]]] = []
        self.executor = FakeExecutor(4, num_slots)
        self.core = EngineCore(
            config,
            tiny_spec(),
            self.executor,
            GrammarCompiler(FakeGrammarBackend(), self.submit, max_wait=0),
        )
        self.core.start(lambda stage, progress: None)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[str, str | None]] = {}

    def submit(self, work: Work) -> Future[Any]:
        self.work.append((work, Future()))
        return self.work[-1][1]

    def compile_all(self) -> None:
        for work, future in self.work:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        self.work = []

    def step(self) -> None:
        for output in self.core.step().outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = (output.finish_reason, output.error_kind)

    def run(self) -> None:
        while self.core.has_unfinished_requests():
            self.step()


def constrained(name: str, regex: str, **fields: object) -> EngineCoreRequest:
    return make_request(
        name,
        10,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(regex=regex),
        eos_token_ids=(EOS_TOKEN_ID,),
        **fields,
    )


def expected(request: EngineCoreRequest) -> list[int]:
    params = request.sampling_params
    assert params.structured_outputs is not None
    matcher = FakeMatcher(str(params.structured_outputs.regex).split()[0])
    return expected_constrained_output(
        request.prompt_token_ids, params.max_tokens or 0, matcher, params.eos_token_ids
    )


def test_others_run_while_a_grammar_is_compiled() -> None:
    """K13: requests that wait for a slow grammar hold no slot and no place in the line."""
    engine = Engine(num_slots=2)
    slow = [constrained(f"slow{i}", str(i)) for i in range(8)]
    for request in slow:
        engine.core.add_request(request)
    plain = [make_request(f"plain{i}", 5) for i in range(20)]
    for request in plain:
        engine.core.add_request(request)
    assert engine.core.stats().num_waiting == 28
    while len(engine.ends) < len(plain):
        engine.step()
    assert engine.core.stats().num_waiting == len(slow)
    engine.compile_all()
    engine.run()
    assert engine.core.stats().num_waiting == 0
    assert all(engine.tokens[r.request_id] == expected(r) for r in slow)


def test_a_grammar_ends_its_answer() -> None:
    """G05: nothing follows a complete answer; the end token need not be sampled."""
    engine = Engine()
    requests = [constrained(f"r{i}", str(i)) for i in range(12)]
    for request in requests:
        engine.core.add_request(request)
    engine.compile_all()
    engine.run()
    without_end_token = 0
    for request in requests:
        assert engine.tokens[request.request_id] == expected(request)
        if engine.ends[request.request_id][0] == "stop":
            without_end_token += engine.tokens[request.request_id][-1] != EOS_TOKEN_ID
    assert without_end_token


def test_others_are_scheduled_ahead_of_a_constrained_request() -> None:
    engine = Engine(depth=2)
    free = make_request("free", 5, max_tokens=30)
    request = constrained("r", "3")
    engine.core.add_request(request)
    engine.core.add_request(free)
    engine.compile_all()
    most = 0
    while engine.core.has_unfinished_requests():
        engine.step()
        most = max(most, engine.core.scheduler.num_steps_in_flight)
    assert most == 1  # beside the one that was just completed
    assert engine.tokens["free"] == expected_output(free.prompt_token_ids, 30)
    assert engine.tokens["r"] == expected(request)


def test_a_step_with_forced_tokens_computes_them_at_once() -> None:
    engine = Engine()
    request = constrained("r", "3")
    engine.core.add_request(request)
    engine.compile_all()
    engine.run()
    assert engine.tokens["r"] == expected(request)
    assert engine.executor.num_forced_tokens > 0
    # One step for the prompt, and one for each token that was sampled after it.
    assert engine.executor.num_steps < len(engine.tokens["r"])


def test_with_logprobs_every_token_is_sampled() -> None:
    engine = Engine()
    engine.core.add_request(constrained("r", "3", logprobs=0))
    engine.compile_all()
    engine.run()
    assert engine.executor.num_forced_tokens == 0
    assert engine.executor.num_steps == len(engine.tokens["r"])


def test_a_matcher_that_fails_ends_its_request_alone() -> None:
    engine = Engine(depth=2)
    good = constrained("good", "3")
    bad = [
        constrained(f"{fault}{i}", f"{i} {fault}") for i in range(8) for fault in ("fill", "accept")
    ]
    for request in (*bad, good):
        engine.core.add_request(request)
    engine.core.add_request(make_request("free", 5))
    engine.compile_all()
    engine.run()
    for fault in ("fill", "accept"):
        ends = [engine.ends[r.request_id] for r in bad if r.request_id.startswith(fault)]
        assert ends.count(("error", "RequestFailedError")) >= 2  # short ones end before they fail
    assert engine.tokens["good"] == expected(good)
    assert engine.ends["free"][0] == "length"


def test_a_grammar_that_is_too_complex_is_the_requests_own_fault() -> None:
    engine = Engine()
    requests = [constrained(f"r{i}", f"{i} complex") for i in range(8)]
    for request in requests:
        engine.core.add_request(request)
    engine.compile_all()
    engine.run()
    ends = list(engine.ends.values())
    assert ends.count(("error", "InvalidRequestError")) >= 2  # short ones end before
    assert not any(kind == "RequestFailedError" for _, kind in ends)


def test_a_contradiction_of_the_request_is_its_own_fault() -> None:
    """Where other fields leave nothing of what the grammar allows, the sampler has no choice."""
    engine = Engine()
    for i in range(8):
        engine.core.add_request(constrained(f"r{i}", f"{i} accept", bad_words=("x",)))
    engine.compile_all()
    engine.run()
    ends = list(engine.ends.values())
    assert ends.count(("error", "InvalidRequestError")) >= 2  # short ones end before


def test_what_cannot_be_compiled_is_refused() -> None:
    engine = Engine()
    engine.core.add_request(constrained("a", "unsupported"))
    engine.core.add_request(constrained("b", "broken"))
    engine.core.add_request(constrained("left", "1"))
    engine.core.abort_requests(["left"])
    engine.compile_all()
    engine.run()
    assert engine.ends == {
        "a": ("error", "InvalidRequestError"),
        "b": ("error", "RequestFailedError"),
    }


def test_an_engine_without_a_backend_refuses() -> None:
    engine = Engine()
    engine.core._grammars = None
    engine.core.add_request(constrained("a", "1"))
    engine.run()
    assert engine.ends == {"a": ("error", "InvalidRequestError")}
