"""Greedy answers equal those of Hugging Face transformers, token for token.

This is the exact path (``--quantization none``): the reference has the same dequantized
weights in float32, and reads the file with code that is not ours. It is asked once for each
answer: where each of its likeliest tokens, given all tokens before it, is the token that we
gave, its own greedy answer is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo_server import LLM, SamplingParams
from support.prompts import PROMPTS
from support.starter_reference import starter_reference

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 64
SOME = (0, 8, 18)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLM]:
    llm = LLM(str(path), max_model_len=1024, quantization="none", **settings)
    try:
        yield llm
    finally:
        llm.shutdown()


def answers(llm: LLM, prompts: list[str] = PROMPTS) -> list[list[int]]:
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def crowd(starter_path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt ids and answers, all at once, without a prefix cache."""
    with engine(starter_path, max_num_batched_tokens=512, enable_prefix_caching=False) as llm:
        results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return (
        [result.prompt_token_ids for result in results],
        [result.outputs[0].token_ids for result in results],
    )


def test_answers_equal_those_of_transformers(
    starter_path: Path, crowd: tuple[list[list[int]], list[list[int]]]
) -> None:
    reference = starter_reference(starter_path)
    for prompt, prompt_ids, token_ids in zip(PROMPTS, *crowd, strict=True):
        assert len(token_ids) == NUM_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt_ids + token_ids[:-1]])).logits[0]
        expected = logits[len(prompt_ids) - 1 :].argmax(dim=-1).tolist()
        assert token_ids == expected, prompt


def test_alone(starter_path: Path, crowd: tuple[list[list[int]], list[list[int]]]) -> None:
    """A few, since one after the other they take ten times as long: short, long, not English."""
    with engine(starter_path, enable_prefix_caching=False) as llm:
        for index in SOME:
            assert answers(llm, [PROMPTS[index]]) == [crowd[1][index]]


def test_small_blocks_and_small_steps(
    starter_path: Path, crowd: tuple[list[list[int]], list[list[int]]]
) -> None:
    with engine(starter_path, block_size=8, max_num_batched_tokens=16) as llm:
        assert answers(llm) == crowd[1]


def test_cold_and_warm_prefix_cache(
    starter_path: Path, crowd: tuple[list[list[int]], list[list[int]]]
) -> None:
    with engine(starter_path) as llm:
        assert answers(llm) == crowd[1]
        cold_hits = llm.engine.scheduler.stats().prefix_cache_hits
        assert answers(llm) == crowd[1]
        warm_hits = llm.engine.scheduler.stats().prefix_cache_hits - cold_hits
    assert warm_hits > cold_hits > 0  # some prompts start alike, so even a cold cache helps


def test_preemption(starter_path: Path, crowd: tuple[list[list[int]], list[list[int]]]) -> None:
    # One request of the longest kind fits; twenty together need about three times the pool.
    with engine(starter_path, num_gpu_blocks_override=64) as llm:
        assert answers(llm) == crowd[1]
        assert llm.engine.scheduler.num_preemptions > 0


def test_blocks_that_were_swapped_out(
    starter_path: Path, crowd: tuple[list[list[int]], list[list[int]]]
) -> None:
    with engine(starter_path, num_gpu_blocks_override=64, swap_space="256MiB") as llm:
        assert answers(llm) == crowd[1]
        assert llm.engine.scheduler.stats().host_cache_hits > 0


def test_steps_scheduled_ahead_of_a_worker_in_another_process(
    starter_path: Path, crowd: tuple[list[list[int]], list[list[int]]]
) -> None:
    with engine(
        starter_path, distributed_executor_backend="mp", num_gpu_blocks_override=100
    ) as llm:
        assert llm.engine._batch_queue_size == 2
        assert answers(llm) == crowd[1]
        assert llm.engine.scheduler.num_preemptions > 0
