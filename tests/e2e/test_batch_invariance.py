"""On the packed path an answer is the same bit for bit, whatever runs beside it.

Log-probabilities are compared as the floats they are: texts could agree by luck.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo_server import LLM, SamplingParams
from support.prompts import PROMPTS

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 24
# Greedy and random ones in turn; each has a seed of its own.
PARAMS = [
    SamplingParams(
        temperature=0.9 if i % 2 else 0.0,
        top_p=0.95,
        seed=i,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=1,
    )
    for i in range(32)
]
CROWD = [PROMPTS[i % len(PROMPTS)] for i in range(32)]
SOME = (0, 1, 11)
"""Of the crowd, those that are asked alone: that the others are right is what they show too."""

Answer = tuple[list[int], list[float]]


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLM]:
    with LLM(str(path), max_model_len=1024, **settings) as llm:
        yield llm


def answers(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[Answer]:
    results = llm.generate(prompts, params, use_tqdm=False)
    return [_answer(result.outputs[0]) for result in results]


def _answer(output: Any) -> Answer:
    return output.token_ids, [entry.chosen.logprob for entry in output.logprobs]


@pytest.fixture(scope="module")
def crowd(starter_path: Path) -> list[Answer]:
    """All 32 at once, in large steps."""
    with engine(starter_path, enable_prefix_caching=False) as llm:
        return answers(llm, CROWD, PARAMS)


def test_alone(starter_path: Path, crowd: list[Answer]) -> None:
    with engine(starter_path, enable_prefix_caching=False) as llm:
        for index in SOME:
            assert answers(llm, [CROWD[index]], [PARAMS[index]]) == [crowd[index]]


@pytest.mark.parametrize("budget", [7, 64])
def test_chunked_by_any_budget(starter_path: Path, crowd: list[Answer], budget: int) -> None:
    # With the prefix cache: chunks start behind blocks that others filled.
    with engine(starter_path, max_num_batched_tokens=budget, max_num_seqs=6) as llm:
        assert answers(llm, CROWD[:12], PARAMS[:12]) == crowd[:12]


def test_preempted(starter_path: Path, crowd: list[Answer]) -> None:
    with engine(starter_path, num_gpu_blocks_override=64) as llm:
        assert answers(llm, CROWD, PARAMS) == crowd
        assert llm.engine.scheduler.num_preemptions > 0


def test_one_thread(starter_path: Path, crowd: list[Answer]) -> None:
    with engine(starter_path, cpu_threads=1) as llm:
        assert answers(llm, CROWD[:12], PARAMS[:12]) == crowd[:12]


def test_the_twins_answer_alike(starter_path: Path, crowd: list[Answer]) -> None:
    """In a process of its own: twins are chosen when the model is made."""
    program = (
        "import sys; from octavo_server import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], max_model_len=64, max_num_batched_tokens=64)\n"
        "params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)\n"
        "for result in llm.generate(sys.argv[2:], params, use_tqdm=False):\n"
        "    print('tokens', *result.outputs[0].token_ids)\n"
    )
    greedy = [0, 2, 4, 6]
    run = subprocess.run(
        [sys.executable, "-c", program, str(starter_path), *(CROWD[index] for index in greedy)],
        env={**os.environ, "OCTAVO_KERNELS": "reference"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("tokens")]
    found = [[int(token_id) for token_id in line] for line in lines]
    assert found == [crowd[index][0][:2] for index in greedy]
