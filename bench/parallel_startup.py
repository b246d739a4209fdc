"""Measure how long an engine of several workers takes to start.

    nox -s bench -- parallel_startup MODEL

prints a row of docs/parallel.md's table for each way to run the model. A server's start adds its
own imports, which go on meanwhile.
"""

from __future__ import annotations

import argparse
import time

import psutil

from octavo_core.config import resolve_config
from octavo_core.engine_core import EngineCore
from octavo_core.model_spec import read_model_spec
from octavo_worker.executors import create_executor

WAYS = {
    "uni": {},
    "mp": {"distributed_executor_backend": "mp"},
    "mp, TP 3": {"tensor_parallel_size": "3"},
    "mp, PP 2": {"pipeline_parallel_size": "2"},
    "mp, TP 3 x PP 2": {"tensor_parallel_size": "3", "pipeline_parallel_size": "2"},
    "ray": {"distributed_executor_backend": "ray"},
}


def measure(model: str, settings: dict[str, str]) -> tuple[float, float, int]:
    """Start an engine once; returns seconds to load, to be ready, and bytes of all workers."""
    config = resolve_config({"max_model_len": 512, **settings}).replace("here", model_path=model)
    spec = read_model_spec(model)
    started = time.perf_counter()
    executor = create_executor(config, spec)
    engine = EngineCore(config, spec, executor)
    loaded: list[float] = []

    def on_progress(stage: str, progress: float | None) -> None:
        if stage == "planning the KV cache" and not loaded:
            loaded.append(time.perf_counter() - started)

    try:
        engine.start(on_progress)
        ready = time.perf_counter() - started
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        memory = sum(process.memory_info().rss for process in processes)
    finally:
        engine.shutdown()
    return loaded[0], ready, memory


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder with safetensors files, or a .gguf file")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    print("| workers | loaded after | ready after | resident memory |\n|---|---|---|---|")
    for way in options.ways:
        load, ready, memory = measure(options.model, WAYS[way])
        print(f"| {way} | {load:.1f} s | {ready:.1f} s | {memory / 2**20:.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
