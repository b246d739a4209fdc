"""What is left of the throughput while another process keeps one of the cores busy.

    nox -s bench -- neighbour
    nox -s bench -- neighbour --rounds 7 --limit 0.4

Threads that wait for each other by spinning lose nearly all of it: one of them waits for its core
while the others spin. An engine of the starter model runs in this process; rounds with and
without the other process alternate, and a figure is the median over the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from octavo_server import LLM, SamplingParams

WORKLOADS = {"one stream": (1, 32, 64), "32 at once": (32, 32, 32), "prefill": (4, 512, 1)}
"""Requests, tokens of each prompt and of each answer."""


def throughput(llm: LLM, workload: tuple[int, int, int]) -> float:
    """Run a workload, and return how many tokens, in and out, it had a second."""
    count, prompt, answer = workload
    # Drawn anew, so that no prompt is in the cache.
    prompts = [random.choices(range(1000, 40_000), k=prompt) for _ in range(count)]
    params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return count * (prompt + answer) / (time.perf_counter() - started)


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Have another process, of its own session, keep a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        os.sched_setaffinity(process.pid, {core})
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, help="fail if less than this share is left")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    llm = LLM(cpu_threads=len(cores))
    worst = 1.0
    for name, workload in WORKLOADS.items():
        throughput(llm, workload)
        ratios = []
        for _ in range(arguments.rounds):
            alone = throughput(llm, workload)
            with busy_core(cores[0]):
                ratios.append(throughput(llm, workload) / alone)
        left = statistics.median(ratios)
        worst = min(worst, left)
        print(f"{name:12} {left:.0%} left ({min(ratios):.0%} to {max(ratios):.0%})", flush=True)
    return int(arguments.limit is not None and worst < arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
