"""Compile every Triton kernel for GPUs that are not here, and look at what came out.

    python tests/kernels/triton/cross_compile.py [--targets sm_80,gfx942] [--only TEXT] [--verbose]

The launchers themselves are called, with tensors on the CPU and a driver that pretends to be the
GPU: so each kernel is specialised as it will be there, with the tiles of that architecture. The
launch then ends where the compiled kernel would be given to the GPU.

Fails if a kernel does not compile, spills a register, or wants more shared memory than there is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Kernels that were decorated for the interpreter can't be compiled.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from cross_compile_cases import cases
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo_kernels.triton import tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class PretendDriver:
    """As much of a driver as a launch asks before it runs anything."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@dataclass(frozen=True)
class Compiled:
    """One kernel as it was compiled.

    Attributes:
        kernel: Name of its function.
        registers: Of a thread.
        spilled: Bytes.
        shared: Bytes of shared memory.
        matrix: The instruction of its matrix products, or ``-``.
    """

    kernel: str
    registers: int
    spilled: int
    shared: int
    matrix: str

    @classmethod
    def read(cls, kernel: Any, target: GPUTarget, log: str) -> Compiled:
        if target.backend == "hip":
            return cls._read_amd(kernel)
        if "bytes spill stores" not in log:
            raise RuntimeError(f"ptxas said nothing about spills:\n{log}")

        def total(pattern: str) -> int:
            return sum(map(int, re.findall(pattern, log)))

        ptx = kernel.asm["ptx"]
        matrix = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "-"
        return cls(
            kernel.metadata.name,
            total(r"Used (\d+) registers"),
            total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
            kernel.metadata.shared,
            matrix,
        )

    @classmethod
    def _read_amd(cls, kernel: Any) -> Compiled:
        text = kernel.asm["amdgcn"]

        def largest(pattern: str) -> int:
            return max(map(int, re.findall(pattern, text)), default=0)

        # Scalar registers spill into lanes of vector registers, which costs no memory access.
        spilled = largest(r"\.vgpr_spill_count:\s*(\d+)")
        return cls(
            kernel.metadata.name,
            largest(r"\.vgpr_count:\s*(\d+)"),
            4 * spilled,
            kernel.metadata.shared,
            "mfma" if "v_mfma" in text else "-",
        )


class Recorder:
    """Stands in for `JITFunction.run`: compiles, notes what came out, launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.compiled: list[Compiled] = []
        self._seen: set[str] = set()
        self._functions: set[Any] = set()
        self._run = JITFunction.run

    @contextlib.contextmanager
    def active(self) -> Any:
        recorder = self

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return recorder.compile(self, args, grid, kwargs)

        JITFunction.run = run
        driver.set_active(PretendDriver(self.target))
        try:
            yield
        finally:
            JITFunction.run = self._run

    def compile(self, function: Any, args: Any, grid: Any, kwargs: Any) -> None:
        if function not in self._functions:
            # What is there was compiled for the target before this one.
            function.device_caches.clear()
            self._functions.add(function)
        log = io.StringIO()
        with (
            triton.knobs.nvidia.scope(),
            triton.knobs.compilation.scope(),
            contextlib.redirect_stdout(log),
        ):
            # The log is the only place that tells of spills, and a cached kernel has none.
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.always_compile = True
            kernel = self._run(
                function, *args, grid=grid, warmup=True, enable_fp_fusion=True, **kwargs
            )
        # The same kernel may be launched again by another case; then nothing was compiled.
        if kernel is not None and kernel.hash not in self._seen:
            self._seen.add(kernel.hash)
            self.compiled.append(Compiled.read(kernel, self.target, log.getvalue()))


def compile_target(name: str, only: str) -> Iterator[tuple[str, bool]]:
    """Compile all cases of one target.

    Yields:
        A line on each kernel, and whether it is as it should be.
    """
    recorder = Recorder(TARGETS[name])
    for case, launch in cases(name):
        if only not in case:
            continue
        first = len(recorder.compiled)
        try:
            with recorder.active():
                launch()
        except Exception as caught:
            error: BaseException = caught
            while error.__cause__ is not None:  # that of the innermost function
                error = error.__cause__
            message = " ".join(str(error).split())[-300:]
            yield f"BAD {name} {case}: {type(error).__name__}: {message}", False
        for result in recorder.compiled[first:]:
            good = result.shared <= tiles.SHARED_MEMORY[name] and not result.spilled
            yield f"{'ok ' if good else 'BAD'} {name} {case}: {result}", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="also print what is as it should be")
    flags = parser.parse_args()
    begun, compiled, bad = time.monotonic(), 0, 0
    for name in flags.targets.split(","):
        for line, good in compile_target(name, flags.only):
            compiled, bad = compiled + 1, bad + (not good)
            if flags.verbose or not good:
                print(line, flush=True)
    seconds = time.monotonic() - begun
    print(f"triton {triton.__version__}: {compiled} compiled, {bad} bad, {seconds:.0f} s")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
