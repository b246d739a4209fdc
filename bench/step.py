"""Where the time of a decode step goes: in native kernels, in the worker, in the engine, around it.

    nox -s bench -- step
    nox -s bench -- step --batch 1 32 --rounds 7 --threads 2

An engine of the starter model runs in this process, as `octavo_server.LLM` runs it. Clocks stand
at four places of each step, so that all figures are of the same steps: around each call of a
kernel, around the worker's part (`execute_model` and `sample_tokens`), around `EngineCore.step`,
and from one step to the next, which adds the text of the answers. Rounds of the batch sizes
alternate; a figure is the median over steps of a round, and then over rounds.

Beside the wall clock stands the CPU time of the thread that steps the engine; while a kernel runs
it waits for nobody, so what the two say of the time outside differs by what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from octavo_kernels.cpu.threads import Team
from octavo_server import LLM, SamplingParams

PLACES = ("kernels", "worker", "engine", "step")
SKIPPED = 4  # steps at the start of a round: prefill, and what is cold after it


@dataclass
class Clock:
    """Seconds at each place since the last step began, on the wall and of this thread's CPU."""

    wall: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PLACES, 0.0))
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PLACES, 0.0))
    steps: list[tuple[dict[str, float], dict[str, float]]] = field(default_factory=list)
    began: tuple[float, float] = (0.0, 0.0)

    def around(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with the time that it takes added to a place's."""

        def timed(*arguments: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.wall[place] += time.perf_counter() - wall
                self.cpu[place] += time.thread_time() - cpu

        return timed

    def begin_step(self) -> None:
        """End the step before, and begin another one."""
        now = time.perf_counter(), time.thread_time()
        self.wall["step"], self.cpu["step"] = now[0] - self.began[0], now[1] - self.began[1]
        self.steps.append((self.wall, self.cpu))
        self.wall, self.cpu = dict.fromkeys(PLACES, 0.0), dict.fromkeys(PLACES, 0.0)
        self.began = now


def main() -> int:
    arguments = parse_arguments()
    settings: dict[str, Any] = {"max_num_seqs": max(arguments.batch), "max_model_len": 1024}
    if arguments.threads:
        settings["cpu_threads"] = arguments.threads
    with LLM(arguments.model, **settings) as llm:
        found: dict[int, list[tuple[dict[str, float], dict[str, float]]]] = {}
        for round_number in range(arguments.rounds + 1):
            for batch in arguments.batch:
                medians = run_round(llm, batch, arguments)
                if round_number:  # the first one warms up
                    found.setdefault(batch, []).append(medians)
    for batch in arguments.batch:
        report(batch, found[batch])
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: the starter model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="default: 1 32")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--steps", type=int, default=64, help="of a round (default: 64)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each (default: 64)")
    parser.add_argument("--threads", type=int, help="default: one for each core")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    return parser.parse_args()


def run_round(
    llm: LLM, batch: int, arguments: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """Answer `batch` prompts; return each place's median over the steps that only decode."""
    prompts = [
        [100 + (row * 7919 + i * 104729) % 40_000 for i in range(arguments.prompt)]
        for row in range(batch)
    ]
    params = SamplingParams(
        temperature=arguments.temperature, seed=1, max_tokens=arguments.steps, ignore_eos=True
    )
    with clocks(llm) as clock:
        llm.generate(prompts, params, use_tqdm=False)
    steps = clock.steps[SKIPPED:-1]
    wall, cpu = (
        {place: statistics.median(step[kind][place] for step in steps) for place in PLACES}
        for kind in (0, 1)
    )
    return wall, cpu


@contextmanager
def clocks(llm: LLM) -> Iterator[Clock]:
    """Set up the clocks for a while."""
    clock = Clock()
    engine: Any = llm.engine
    executor = engine._executor
    step = clock.around("engine", engine.step)

    def counted_step() -> Any:
        clock.begin_step()
        return step()

    def method(target: Any, name: str) -> Any:
        return mock.patch.object(target, name, clock.around("worker", getattr(target, name)))

    with (
        mock.patch.object(Team, "run", clock.around("kernels", Team.run)),
        method(executor, "execute_model"),
        method(executor, "sample_tokens"),
        mock.patch.object(engine, "step", counted_step),
    ):
        yield clock


def report(batch: int, rounds: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    for kind, name in enumerate(("wall", "CPU")):
        taken = {
            place: statistics.median(medians[kind][place] for medians in rounds) for place in PLACES
        }
        outside = [
            statistics.median(
                1 - medians[kind]["kernels"] / medians[kind][place] for medians in rounds
            )
            for place in ("worker", "step")
        ]
        print(
            f"batch {batch:3} {name:4}: step {taken['step'] * 1e3:6.2f} ms, engine "
            f"{taken['engine'] * 1e3:6.2f}, worker {taken['worker'] * 1e3:6.2f}, kernels "
            f"{taken['kernels'] * 1e3:6.2f}; outside the kernels {outside[0] * 100:4.1f} % of the "
            f"worker's part, {outside[1] * 100:4.1f} % of the step",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
