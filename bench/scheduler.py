"""What the scheduler costs the host: steady decode, admission, blocks, wire, import.

    nox -s bench -- scheduler
    nox -s bench -- scheduler --json figures.json --limit decode_256=1200

It is the processor's time that is measured, so others on the machine count only as far as
they slow this process down. Everything is measured in turn, round after round, so that a
noisy moment hits all alike; the figure is the median over the rounds. "loops" is the same
figure in units of a fixed piece of plain Python measured in the same round, which carries
over from one machine to another better than nanoseconds do.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec

from octavo_core import wire
from octavo_core.block_manager import BlockManager
from octavo_core.block_pool import BlockPool
from octavo_core.config import SchedulerConfig
from octavo_core.policies import load_policy
from octavo_core.request import Request
from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler import Scheduler
from octavo_core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo_core.wire import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

PROMPT = 256
BLOCK_SIZE = 16
LONG_PROMPT = 32 * 1024
NUM_WAITING = 10_000
STEPS_PER_ROUND = 2 * BLOCK_SIZE  # each request fills two blocks
MAX_MODEL_LEN = 1 << 20


@dataclass
class Figure:
    """One thing that is measured.

    Attributes:
        unit: What `measure` returns.
        measure: Does it once.
        samples: One for each round.
        loops: The same in units of `calibrate`.
    """

    name: str
    unit: str
    what: str
    measure: Callable[[], float]
    samples: list[float] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def main() -> int:
    arguments = parse_arguments()
    figures = make_figures(arguments.scheduling_policy, arguments.rounds)
    gc.collect()
    gc.freeze()  # as the engine does after its start
    for _ in range(arguments.rounds):
        loop_ns = calibrate()
        for figure in figures:
            value = figure.measure()
            figure.samples.append(value)
            figure.loops.append(value * NANOSECONDS[figure.unit] / loop_ns)
    results = summarize(figures)
    for name, result in results.items():
        print(f"{name:24}" + describe(result), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=2)
    return check_limits(results, arguments.limit)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each (default: 11)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument(
        "--limit",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="exit with 1 if the figure NAME is above VALUE; may be given several times",
    )
    parser.add_argument("--scheduling-policy", default="fcfs", help="(default: fcfs)")
    return parser.parse_args()


def summarize(figures: list[Figure]) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    for figure in figures:
        results[figure.name] = {
            "value": figure.median,
            "unit": figure.unit,
            "min": min(figure.samples),
            "loops": statistics.median(figure.loops),
            "what": figure.what,
        }
    by_name = {figure.name: figure.samples for figure in figures}
    for name in ("256_waiting", "256_blocked", "1024_waiting"):
        base = by_name[f"decode_{name.split('_')[0]}"]
        ratios = [a / b for a, b in zip(by_name[f"decode_{name}"], base, strict=True)]
        results[f"ratio_{name}"] = {
            "value": statistics.median(ratios),
            "unit": "x",
            "what": f"decode_{name} over the same without waiting requests, round by round",
        }
    return results


def describe(result: dict[str, object]) -> str:
    if result["unit"] == "x":
        return f"{result['value']:10.3f} x{'':36}{result['what']}"
    return (
        f"{result['value']:10.1f} {result['unit']:14} min {result['min']:8.1f} "
        f"{result['loops']:11.2f} loops  {result['what']}"
    )


def check_limits(results: dict[str, dict[str, object]], limits: list[str]) -> int:
    exceeded = 0
    for limit in limits:
        name, _, number = limit.partition("=")
        if name not in results:
            raise SystemExit(f"--limit {limit}: there is no {name}; known: {', '.join(results)}")
        value = results[name]["value"]
        assert isinstance(value, float)
        if value > float(number):
            print(f"OVER: {name} is {value:.1f}, the limit is {number}")
            exceeded = 1
    return exceeded


NANOSECONDS = {"ns/request/step": 1.0, "ns/block": 1.0, "us": 1e3, "ms": 1e6}


def calibrate() -> float:
    """Return the nanoseconds of one turn of a loop that does what schedulers do."""
    table = {number: [number] for number in range(1024)}
    turns = 100 * 1024
    start = time.thread_time()
    total = 0
    for turn in range(turns):
        row = table[turn & 1023]
        total += len(row) + row[0]
    return (time.thread_time() - start) / turns * 1e9


def make_figures(policy: str, rounds: int) -> list[Figure]:
    decode = "schedule + update, each of {} decodes, prompt 256, block 16"
    figures = []
    for count in (256, 1024):
        for kind, suffix, more in (
            ("none", "", ""),
            ("slots", "_waiting", "; 10,000 wait for a slot"),
            ("blocks", "_blocked", "; 10,000 wait, the first for blocks"),
        ):
            if (count, kind) != (1024, "blocks"):  # its first prompt would be 500,000 tokens
                figures.append(
                    Figure(
                        f"decode_{count}{suffix}",
                        "ns/request/step",
                        decode.format(count) + more,
                        Decode(policy, count, rounds, kind).measure,
                    )
                )
    long = LongPrompt()
    blocks = Blocks()
    encoded = Wire(1024)
    figures += [
        Figure("admit_32k_cold", "us", "add + schedule a 32k prompt nobody knows", long.cold),
        Figure("admit_32k_warm", "us", "add + schedule a 32k prompt that is cached", long.warm),
        Figure("lookup_32k", "us", "prefix lookup of 32k tokens, hashes known", long.lookup),
        Figure("allocate", "ns/block", "take blocks that were never used", blocks.allocate),
        Figure("evict", "ns/block", "take blocks that are cached", blocks.evict),
        Figure("free", "ns/block", "let go of blocks", blocks.free),
    ]
    for direction in ("outputs", "step"):
        for action in ("encode", "decode"):
            figures.append(
                Figure(
                    f"{action}_{direction}_1024",
                    "us",
                    f"{action} {encoded.names[direction]} of 1,024 decodes, "
                    f"{encoded.size(direction)} bytes",
                    getattr(encoded, f"{action}_{direction}"),
                )
            )
    for name, module in (("import", "octavo_core"), ("import_scheduler", "octavo_core.scheduler")):
        figures.append(
            Figure(name, "ms", f"import {module}, beyond Python", partial(imports, module))
        )
    return figures


class Decode:
    """Requests that decode and never end, and others that wait for a slot or for blocks."""

    def __init__(self, policy: str, count: int, rounds: int, waiting: str) -> None:
        tokens = PROMPT + 1 + (rounds + 1) * STEPS_PER_ROUND
        num_blocks = count * -(-tokens // BLOCK_SIZE) * 102 // 100  # above the watermark
        config = SchedulerConfig(
            max_num_batched_tokens=count * PROMPT,
            max_num_seqs=count + (1 if waiting == "blocks" else 0),
            max_num_queued_reqs=2 * NUM_WAITING,
        )
        self.count = count
        self.scheduler = Scheduler(
            config, BlockManager(num_blocks, BLOCK_SIZE), MAX_MODEL_LEN, load_policy(policy)
        )
        for number in range(count):
            self.add(number, PROMPT, tokens)
        self.steps(2)
        assert len(self.scheduler.running) == count
        if waiting == "blocks":
            pool = self.scheduler.blocks.pool
            self.add(count, (pool.num_free + 1) * BLOCK_SIZE, 1)
        if waiting != "none":
            for number in range(NUM_WAITING):
                self.add(count + 1 + number, 16, 1)
        self.steps(STEPS_PER_ROUND - 2)

    def add(self, number: int, prompt: int, max_tokens: int) -> None:
        self.scheduler.add_request(make_request(number, prompt, max_tokens))

    def steps(self, count: int) -> None:
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output
        sampled = [7] * self.count
        for _ in range(count):
            step = schedule()
            assert step is not None
            update(ModelRunnerOutput(step.step_id, sampled))

    def measure(self) -> float:
        start = time.thread_time()
        self.steps(STEPS_PER_ROUND)
        elapsed = time.thread_time() - start
        assert len(self.scheduler.running) == self.count
        return elapsed / STEPS_PER_ROUND / self.count * 1e9


class LongPrompt:
    """A prompt of 32k tokens that is admitted, and admitted again."""

    def __init__(self) -> None:
        self.blocks = BlockManager(4 * LONG_PROMPT // BLOCK_SIZE, BLOCK_SIZE)
        config = SchedulerConfig(max_num_batched_tokens=2 * LONG_PROMPT)
        self.scheduler = Scheduler(config, self.blocks, MAX_MODEL_LEN)
        self.number = 0

    def cold(self) -> float:
        self.number += 1
        return self.admit()

    def warm(self) -> float:
        return self.admit()

    def admit(self) -> float:
        request = make_request(self.number, LONG_PROMPT, 1)
        with timer() as elapsed:
            self.scheduler.add_request(request)
            step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.update_from_output(ModelRunnerOutput(step.step_id, [7]))
        assert not self.scheduler.has_unfinished_requests()
        return elapsed[0] * 1e6

    def lookup(self) -> float:
        request = Request(make_request(self.number, LONG_PROMPT, 1), MAX_MODEL_LEN)
        self.blocks.find_cached_prefix(request)  # hashes it
        with timer() as elapsed:
            found = self.blocks.find_cached_prefix(request)
        assert found.num_tokens == LONG_PROMPT - BLOCK_SIZE
        return elapsed[0] * 1e6


class Blocks:
    """A pool from which much is taken at once."""

    COUNT = 50_000

    def allocate(self) -> float:
        pool = BlockPool(self.COUNT)
        return self.timed(lambda: pool.allocate(self.COUNT))

    def evict(self) -> float:
        pool = BlockPool(self.COUNT)
        block_ids, _ = pool.allocate(self.COUNT)
        for block_id in block_ids:
            pool.register(block_id, block_id.to_bytes(32, "little"))
        pool.free(block_ids)
        return self.timed(lambda: pool.allocate(self.COUNT))

    def free(self) -> float:
        pool = BlockPool(self.COUNT)
        block_ids, _ = pool.allocate(self.COUNT)
        return self.timed(lambda: pool.free(reversed(block_ids)))

    def timed(self, work: Callable[[], object]) -> float:
        with timer() as elapsed:
            work()
        return elapsed[0] / self.COUNT * 1e9


class Wire:
    """Both messages of a step in which all requests decode and a sixteenth needs a block."""

    def __init__(self, count: int) -> None:
        outputs = [
            EngineCoreOutput(f"cmpl-{number:032x}-0-0", [number], num_cached_tokens=PROMPT)
            for number in range(count)
        ]
        self.outputs = EngineCoreOutputs(outputs, wire.SchedulerStats(num_running=count))
        self.step = SchedulerOutput(
            step_id=1,
            freed_slots=[],
            new_requests=[],
            new_block_ids=[(slot, [[slot * 50]]) for slot in range(0, count, BLOCK_SIZE)],
            slots=list(range(count)),
            num_scheduled_tokens=[1] * count,
            num_computed_tokens=[PROMPT + slot % 100 for slot in range(count)],
        )
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self.names = {"outputs": "the EngineCoreOutputs", "step": "the SchedulerOutput"}
        self.frames = {
            "outputs": wire.encode(self.outputs),
            "step": self.encoder.encode(self.step),
        }

    def size(self, direction: str) -> int:
        return len(self.frames[direction])

    def encode_outputs(self) -> float:
        return timed_often(lambda: wire.encode(self.outputs))

    def decode_outputs(self) -> float:
        return timed_often(lambda: wire.decode_to_front(self.frames["outputs"]))

    def encode_step(self) -> float:
        return timed_often(lambda: self.encoder.encode(self.step))

    def decode_step(self) -> float:
        return timed_often(lambda: self.decoder.decode(self.frames["step"]))


def imports(module: str) -> float:
    """Return the milliseconds that the first import takes in a new interpreter."""
    code = (
        f"import time; start = time.thread_time(); import {module}; "
        "print(time.thread_time() - start)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return float(result.stdout) * 1e3


def make_request(number: int, prompt: int, max_tokens: int) -> EngineCoreRequest:
    """A request that shares its prompt with no other number."""
    tokens = [number & 0x7FFF, number >> 15, *((index * 7) & 0x7FFF for index in range(prompt - 2))]
    params = SamplingParams(max_tokens=max_tokens)
    return EngineCoreRequest(f"cmpl-{number:032x}-0-0", tokens, params)


@contextmanager
def timer() -> Iterator[list[float]]:
    """Yield a list that holds the seconds of the block once it is over."""
    elapsed: list[float] = []
    start = time.thread_time()
    yield elapsed
    elapsed.append(time.thread_time() - start)


def timed_often(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the microseconds of one call."""
    start = time.thread_time()
    for _ in range(repeats):
        work()
    return (time.thread_time() - start) / repeats * 1e6


if __name__ == "__main__":
    sys.exit(main())
