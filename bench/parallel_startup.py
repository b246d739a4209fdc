"""Measure the stages of an engine's start: in one process, in several, and in a Ray cluster.

    nox -s bench -- parallel_startup MODEL [--ways uni mp] [--runs 3]

prints the table of docs/parallel.md, medians of the runs. Each run is a process of its own that
starts an engine and ends it; a server's start adds its own imports, which go on meanwhile. For
the Ray cluster, which the engine starts on this machine, Ray has to be there:

    PYTHONPATH=.nox/ray nox -s bench -- parallel_startup MODEL --ways ray
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

WAYS = {
    "uni": {},
    "mp": {"distributed_executor_backend": "mp"},
    "mp, TP 3": {"tensor_parallel_size": "3"},
    "mp, PP 2": {"pipeline_parallel_size": "2"},
    "mp, TP 3 x PP 2": {"tensor_parallel_size": "3", "pipeline_parallel_size": "2"},
    "ray": {"distributed_executor_backend": "ray"},
}
STAGES = {
    "starting processes": "loading weights",
    "loading weights": "planning the KV cache",
    "planning and allocating the KV cache": "warming up",
    "warming up": "ready",
}
"""What each stage ends with: the progress that is told, and at last that it is over."""

Stage = tuple[float, int]
"""When a stage ended, in seconds since the start, and the bytes that all processes had then."""


def start_once(way: str, model: str, begun: float) -> dict[str, Stage]:
    """Start an engine and end it.

    Args:
        way: One of `WAYS`.
        model: A folder with safetensors files, or a .gguf file.
        begun: When this process was started, as `time.time` has it.

    Returns:
        By what each stage ended with.
    """
    from octavo_core.config import resolve_config
    from octavo_core.engine_core import EngineCore
    from octavo_core.model_spec import read_model_spec
    from octavo_worker.executors import create_executor

    ends: dict[str, Stage] = {}
    looked = 0.0  # seconds that were spent on looking at memory

    def note(stage: str, progress: float | None = None) -> None:
        nonlocal looked
        if stage not in ends and stage in STAGES.values():
            now = time.time()
            ends[stage] = now - begun - looked, resident_bytes()
            looked += time.time() - now

    config = resolve_config({"max_model_len": 512, **WAYS[way]}).replace("here", model_path=model)
    spec = read_model_spec(model)
    engine = EngineCore(config, spec, create_executor(config, spec))
    try:
        engine.start(note)
        note("ready")
    finally:
        engine.shutdown()
    return ends


def resident_bytes() -> int:
    """Return what this process and those below it have in memory; shared pages count once."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            memory = process.memory_full_info()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += getattr(memory, "pss", memory.rss)
    return total


def measure(way: str, model: str) -> dict[str, Stage]:
    """Start an engine in a process of its own."""
    command = [sys.executable, __file__, model, "--once", way, "--begun", str(time.time())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Stage] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(way: str, runs: Sequence[dict[str, Stage]]) -> str:
    """Make a row of the table."""
    cells = [way]
    begun = [0.0] * len(runs)
    for end in STAGES.values():
        seconds = statistics.median(run[end][0] - at for run, at in zip(runs, begun, strict=True))
        mib = statistics.median(run[end][1] for run in runs) / 2**20
        cells.append(f"{seconds:.1f} s, {mib:.0f} MiB")
        begun = [run[end][0] for run in runs]
    cells.append(f"{statistics.median(begun):.1f} s")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="a folder with safetensors files, or a .gguf file")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--runs", type=int, default=3, help="of each way (default: 3)")
    parser.add_argument("--once", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(start_once(options.once, options.model, options.begun)))
        return
    header = ["workers", *STAGES, "all"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    for way in options.ways:
        runs = [measure(way, options.model) for _ in range(options.runs)]
        print(row(way, runs), flush=True)


if __name__ == "__main__":
    main()
