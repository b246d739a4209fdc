"""What every engine under comparison runs inside its own environment.

A process reads workloads as JSON lines and answers each with a JSON line. It needs nothing
but the standard library, and the engine that it wraps.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

# Ids that every tokenizer of the starter model's family has, with no special ones among them.
FIRST_ID, LAST_ID = 1_000, 40_000

TokenIds = list[int]


class OfflineEngine(Protocol):
    """An engine inside this process.

    `generate` continues every prompt greedily by exactly `num_tokens` tokens, all of them
    at once, whatever end tokens come.
    """

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> None: ...


def serve_workloads(engine: OfflineEngine) -> None:
    """Carry out the workloads that come on standard input, until it ends."""
    answer(ready=True)
    for line in sys.stdin:
        workload = json.loads(line)
        answer(value=measure(engine, workload))


def measure(engine: OfflineEngine, workload: dict[str, Any]) -> float:
    """Return tokens per second of one workload.

    Workloads (``kind``): ``decode`` is one stream's rate without its prefill, ``prefill``
    the prompt tokens per second of one prompt, ``crowd`` the output tokens per second of
    requests that arrive together, with their prefill counted.
    """
    draw = random.Random(workload["seed"])
    count, shared = workload.get("count", 1), workload.get("shared", 0)
    prefix = token_ids(draw, shared)
    prompts = [prefix + token_ids(draw, workload["prompt"]) for _ in range(count)]
    answer_length = workload.get("answer", 1)
    match workload["kind"]:
        case "decode":
            first = seconds(engine, prompts, 1)
            # Its prompt is another one, so that no cache makes the second prefill shorter.
            other = [token_ids(draw, workload["prompt"])]
            return (answer_length - 1) / (seconds(engine, other, answer_length) - first)
        case "prefill":
            return workload["prompt"] / seconds(engine, prompts, 1)
        case "crowd":
            return count * answer_length / seconds(engine, prompts, answer_length)
        case kind:
            raise ValueError(f"unknown workload {kind!r}")


def seconds(engine: OfflineEngine, prompts: Sequence[TokenIds], num_tokens: int) -> float:
    start = time.perf_counter()
    engine.generate(prompts, num_tokens)
    return time.perf_counter() - start


def token_ids(draw: random.Random, count: int) -> TokenIds:
    return [draw.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def answer(**values: Any) -> None:
    # Engines write to standard output as they like; answers are told apart by their mark.
    print("@" + json.dumps(values), flush=True)
