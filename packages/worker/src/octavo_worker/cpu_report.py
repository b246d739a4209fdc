"""What this machine's CPU offers the kernels, and whether they are compiled for it."""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec

from octavo_kernels import WEIGHT_KINDS, compile_kernels, serving_kernels
from octavo_kernels.attention_problem import attend
from octavo_kernels.compile_kernels import CompileProgress
from octavo_kernels.cpu.jit import Kernel, cache_can_be_written, cache_folder
from octavo_kernels.cpu.threads import default_num_threads

# What the kernels have instructions for, as LLVM and Linux name it.
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512vnni", "avxvnni", "neon", "dotprod")
_CPUINFO = Path("/proc/cpuinfo")


class CPUReport(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the CPU and its kernels.

    Attributes:
        name: What the CPU calls itself.
        features: Those of `_FEATURES` that it has.
        num_threads: Threads that kernels run on by default.
        kernel_folder: Where compiled kernels are kept.
        is_writable: Whether they can be kept there.
        kernels_compiled: How many of those that serving can need.
        kernels_total: How many that is, over all kinds of weights and types of KV cache.
        missing: Names of those that are not compiled.
    """

    name: str
    features: list[str]
    num_threads: int
    kernel_folder: str
    is_writable: bool
    kernels_compiled: int
    kernels_total: int
    missing: list[str]


def report_cpu() -> CPUReport:
    """Look at the CPU and at the cache of kernels; nothing is compiled."""
    kernels = _all_kernels()
    missing = [kernel.name for kernel in kernels if not kernel.is_compiled]
    return CPUReport(
        name=_cpu_name(),
        features=_features(),
        num_threads=default_num_threads(),
        kernel_folder=str(cache_folder()),
        is_writable=cache_can_be_written(),
        kernels_compiled=len(kernels) - len(missing),
        kernels_total=len(kernels),
        missing=missing,
    )


def compile_all(progress: CompileProgress | None = None) -> int:
    """Compile all that serving can need; return how many that were."""
    return compile_kernels(_all_kernels(), progress)


def _all_kernels() -> list[Kernel]:
    kinds = [kind for kind in WEIGHT_KINDS if kind not in ("u4z", "e4m3")]
    dtypes = [dtype for dtype in attend if dtype.itemsize > 1]
    return serving_kernels(kinds, dtypes)


def _cpu_name() -> str:
    from llvmlite import binding

    name = f"{platform.machine()} ({binding.get_host_cpu_name()})"
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return name
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{found[0]}, {name}" if found else name


def _features() -> list[str]:
    from llvmlite import binding

    available = binding.get_host_cpu_features()
    return [name for name in _FEATURES if available.get(name)]
