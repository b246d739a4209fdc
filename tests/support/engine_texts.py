"""Runs an engine over a few requests, for comparing engines with each other."""

from __future__ import annotations

from octavo_core.config import EngineConfig
from octavo_core.engine_core import EngineCore
from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import read_model_spec
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_worker.executors import create_executor

# Prompts of several lengths that share a prefix of a block or two.
PROMPTS = [[(3 * i * i + 5 * i) % 290 for i in range(length)] for length in (3, 17, 40, 41, 64, 9)]


def requests(max_tokens: int = 12) -> list[EngineCoreRequest]:
    """Make one request for each prompt; every other one is sampled with a seed."""
    return [
        EngineCoreRequest(
            f"request-{index}",
            prompt,
            SamplingParams(
                temperature=0.8 * (index % 2), seed=index, max_tokens=max_tokens, logprobs=1
            ),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def start_engine(
    config: EngineConfig, on_progress: ProgressCallback = lambda stage, progress: None
) -> EngineCore:
    """Start an engine; the caller shuts it down."""
    spec = read_model_spec(config.model_path)
    engine = EngineCore(config, spec, create_executor(config, spec))
    try:
        engine.start(on_progress)
    except BaseException:
        engine.shutdown()
        raise
    return engine


def run(engine: EngineCore, wanted: list[EngineCoreRequest]) -> dict[str, list[int]]:
    """Add all requests, and step until they are complete; returns their tokens."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for request in wanted:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
    return tokens


def generate(config: EngineConfig, max_tokens: int = 12) -> dict[str, list[int]]:
    """Start an engine, answer `requests` and shut it down."""
    engine = start_engine(config)
    try:
        return run(engine, requests(max_tokens))
    finally:
        engine.shutdown()
