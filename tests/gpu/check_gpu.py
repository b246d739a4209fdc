"""All that needs a GPU, in one run of less than 8 minutes on a Hopper GPU.

    export PYTHONPATH=packages/core/src:packages/kernels/src:packages/worker/src
    python tests/gpu/check_gpu.py

checks every Triton kernel against its torch twin (`check_kernels.py`), a small model against the
same model on the CPU, and graphs against single launches; and times decode steps of a model that
has the shape of Llama 3 8B and random weights, as a share of the memory bandwidth of a large copy.
It needs torch 2.11, triton 3.6.0, numpy, msgspec, psutil and safetensors, on Python 3.12, and no
network. Without a GPU it says so and ends with status 0; with ``--dry-run`` it does what it can
on a CPU, with graphs that only call again. It ends with status 1 if anything differs, or if
there was no time for something.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo_core.config import EngineConfig, resolve_config
from octavo_core.engine_core import EngineCore
from octavo_core.model_spec import ModelSpec, read_model_spec, spec_from_config
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_worker import worker as worker_module
from octavo_worker.executors import create_executor
from octavo_worker.graph_capture import CudaGraphMaker, GraphedModel, GraphMaker
from octavo_worker.kv_caches import allocate_kv_caches
from octavo_worker.model_runner import ModelInput, ModelRunner
from octavo_worker.models import Model, resolve_model_class

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
SMALL_MIXTURE = SMALL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LLAMA_3_8B = SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
BLOCK_SIZE = 16
# Sums of some hundred products of float32, in another order.
CLOSE = 2e-3
MIB = 2**20


class CallAgain:
    """Makes graphs for a CPU, which call what they recorded."""

    def capture(self, run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        """Call `run`; a replay calls it again, into the same memory."""
        output = run()

        class Graph:
            def replay(self) -> None:
                output.copy_(run())

        return Graph(), output


class Checks:
    """Runs checks, and counts those that fail.

    Args:
        device: Where.
        is_dry: Whether it is a CPU, for the logic alone.
        deadline: Of `time.monotonic`, after which nothing is begun any more.
    """

    def __init__(self, device: torch.device, is_dry: bool, deadline: float) -> None:
        self.device = device
        self.is_dry = is_dry
        self.deadline = deadline
        self.num_bad = 0
        self.figures: dict[str, float] = {}

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Run one; an exception is a failure, and the others go on."""
        begun = time.monotonic()
        try:
            if begun > self.deadline:
                raise TimeoutError("there was no time left for it")
            word, text = "ok ", check()
        except Exception as error:
            word, text = "BAD", f"{type(error).__name__}: {error}"[:500]
            self.num_bad += 1
        print(f"{word} {name}: {text} ({time.monotonic() - begun:.1f} s)", flush=True)

    def kernels(self) -> str:
        """Every Triton kernel against its twin."""
        if importlib.util.find_spec("triton") is None:
            if not self.is_dry:
                raise RuntimeError("triton is not installed")
            return "left out: triton is not installed"
        os.environ["OCTAVO_KERNELS"] = "reference"  # the twins have to be the twins
        try:
            sys.path.insert(0, str(Path(__file__).parent))
            import check_kernels

            if self.is_dry:
                return f"left out: {sum(1 for _ in check_kernels.checks())} checks need a GPU"
            if check_kernels.main(self.deadline):
                raise AssertionError("a kernel differs, see above")
        finally:
            del os.environ["OCTAVO_KERNELS"]
        return "all are as close as they have to be"

    def small_model(self, config: dict[str, Any]) -> str:
        """Logits and greedy tokens of the CPU, and of graphs and single launches."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            expected = generate(engine_config(folder, "cpu", quantization="none"))
            eager = generate(engine_config(folder, self.device.type, enforce_eager=True))
            graphed = generate(engine_config(folder, self.device.type))
        difference = max(
            abs(one - other)
            for tokens, others in zip(expected, eager, strict=True)
            for (_, one), (_, other) in zip(tokens, others, strict=True)
        )
        if [ids(answer) for answer in eager] != [ids(answer) for answer in expected]:
            raise AssertionError(f"tokens are not the CPU's; logprobs differ by {difference:.1e}")
        if difference > CLOSE:
            raise AssertionError(f"logprobs differ by {difference:.1e} (limit {CLOSE:.0e})")
        if [ids(answer) for answer in graphed] != [ids(answer) for answer in eager]:
            raise AssertionError("tokens with graphs are not those without")
        count = sum(len(answer) for answer in expected)
        return f"{count} tokens equal on CPU, GPU and in graphs; logprobs within {difference:.1e}"

    def decode(self) -> str:
        """Decode steps of an 8B model: milliseconds, and share of the bandwidth."""
        config = SMALL if self.is_dry else LLAMA_3_8B
        spec = spec_from_config(config)
        dtype = torch.float32 if self.is_dry else torch.bfloat16
        bandwidth = copy_bandwidth(self.device, 8 * MIB if self.is_dry else 2048 * MIB)
        self.figures["copy bandwidth, GB/s"] = bandwidth / 1e9
        model, weight_bytes = random_model(spec, dtype, self.device)
        length = 64 if self.is_dry else 1024
        lines = [f"copy {bandwidth / 1e9:.0f} GB/s"]
        for rows in (1, 3) if self.is_dry else (1, 8, 64):
            for is_graphed in (False, True):
                seconds, kv_bytes = self._time_decode(spec, model, dtype, rows, length, is_graphed)
                share = (weight_bytes + kv_bytes) / seconds / bandwidth
                name = f"{rows} rows of {length} tokens, {'graph' if is_graphed else 'eager'}"
                self.figures[f"{name}, ms"] = seconds * 1e3
                self.figures[f"{name}, share"] = share
                lines.append(f"{name}: {seconds * 1e3:.2f} ms, {share:.0%} of the bandwidth")
        return "\n      ".join(lines)

    def _time_decode(
        self,
        spec: ModelSpec,
        model: Model,
        dtype: torch.dtype,
        rows: int,
        length: int,
        is_graphed: bool,
    ) -> tuple[float, int]:
        """Return the seconds of a step, logits included, and the bytes of K and V it reads."""
        blocks = -(-length // BLOCK_SIZE)
        runs: Model = model
        if is_graphed:
            runs = GraphedModel(
                model,
                [0] * spec.num_hidden_layers,
                max_num_seqs=rows,
                max_blocks=blocks,
                block_size=BLOCK_SIZE,
                device=self.device,
                maker=self._graph_maker(),
            )
        runner = ModelRunner(runs, max_num_seqs=rows, block_size=BLOCK_SIZE, device=self.device)
        caches = allocate_kv_caches(spec, rows * blocks, BLOCK_SIZE, dtype, self.device)
        if isinstance(runs, GraphedModel):
            runs.capture(caches, lambda *_: None)
        step = decode_input(runner, rows, length)

        @torch.inference_mode()
        def run() -> None:
            model.compute_logits(runner.forward(step, caches))

        seconds = median_seconds(run, self.device, 3 if self.is_dry else 30)
        kv_heads = 2 * spec.num_key_value_heads * spec.head_dim * dtype.itemsize
        return seconds, rows * length * kv_heads * spec.num_hidden_layers

    def _graph_maker(self) -> GraphMaker:
        return CallAgain() if self.is_dry else CudaGraphMaker()


def engine_config(folder: str, device: str, **values: Any) -> EngineConfig:
    """Make a configuration of an engine with random weights in float32."""
    defaults = {
        "device": device,
        "dtype": "float32",
        "load_format": "dummy",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "num_gpu_blocks_override": 128,
        "gpu_memory_utilization": 0.5,
        "quantization": "none",
    }
    return resolve_config(defaults | values).replace("this check", model_path=folder)


def generate(config: EngineConfig) -> list[list[tuple[int, float]]]:
    """Answer a few prompts together; returns each answer's tokens and their logprobs."""
    spec = read_model_spec(config.model_path)
    engine = EngineCore(config, spec, create_executor(config, spec))
    engine.start(lambda *_: None)
    answers: dict[str, list[tuple[int, float]]] = {}
    for index, length in enumerate((3, 100, 17, 64, 1)):
        prompt = [(7 * i * i + 11 * i + index) % 990 for i in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, seed=0)
        engine.add_request(EngineCoreRequest(str(index), prompt, params))
        answers[str(index)] = []
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            reports = output.logprobs or []
            for token, report in zip(output.new_token_ids, reports, strict=True):
                answers[output.request_id].append((token, report.logprobs[0]))
    engine.shutdown()
    return list(answers.values())


def ids(answer: list[tuple[int, float]]) -> list[int]:
    """Return an answer's tokens."""
    return [token for token, _ in answer]


def random_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[Model, int]:
    """Make a model with random weights on the device, and say how many bytes a step reads."""
    definition = resolve_model_class(spec)
    weights: dict[str, Any] = {}
    num_bytes = 0
    for entry in definition.weight_layout(spec):
        rows = sum(part.shape[0] for part in entry.parts)
        shape = (rows, *entry.parts[0].shape[1:])
        tensor = torch.empty(shape, dtype=entry.dtype or dtype, device=device)
        weights[entry.name] = tensor.normal_(float("norm" in entry.name), 0.02)
        if "embed" not in entry.name:  # of which a step reads a row for each token
            num_bytes += tensor.nbytes
    return definition(spec, weights, spec.max_position_embeddings, device), num_bytes


def decode_input(runner: ModelRunner, rows: int, length: int) -> ModelInput:
    """Lay out a step of one token for each row."""
    blocks = -(-length // BLOCK_SIZE)
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    return runner.to_device(
        input_ids=np.arange(rows, dtype=np.int32),
        positions=np.full(rows, length - 1),
        query_start_loc=np.arange(rows + 1),
        seq_lens=np.full(rows, length),
        slot_mappings=[tables[:, -1].astype(np.int64) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE],
        block_tables=[tables],
    )


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return bytes a second that a copy reads and writes together."""
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), device, 10)


def median_seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the median time of a call, after three that do not count."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    taken = []
    for number in range(times + 3):
        wait()
        begun = time.perf_counter()
        run()
        wait()
        if number >= 3:
            taken.append(time.perf_counter() - begun)
    return sorted(taken)[len(taken) // 2]


def main() -> int:
    """Run all checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="the logic alone, on a CPU")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="after which nothing is begun (default: 7.5)"
    )
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no CUDA or ROCm device here")
        return 0
    device = torch.device("cpu" if options.dry_run else "cuda")
    torch.manual_seed(0)
    # What is compared in float32 must not be rounded to fewer bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    print(
        f"Python {sys.version.split()[0]}, torch {torch.__version__},",
        "a dry run" if options.dry_run else torch.cuda.get_device_name(),
        flush=True,
    )
    begun = time.monotonic()
    checks = Checks(device, options.dry_run, begun + 60 * options.minutes)
    if options.dry_run:
        worker_module.captures_graphs = lambda config, *_: not config.model.enforce_eager
        worker_module.CudaGraphMaker = CallAgain
        torch.set_num_threads(1)
    checks.run("small model", partial(checks.small_model, SMALL))
    checks.run("small mixture", partial(checks.small_model, SMALL_MIXTURE))
    checks.run("decode", checks.decode)
    checks.run("kernels", checks.kernels)  # last: most of the time, and all of the compiling
    print(f"{checks.num_bad} bad, {time.monotonic() - begun:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(checks.figures, indent=2))
    return int(checks.num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
