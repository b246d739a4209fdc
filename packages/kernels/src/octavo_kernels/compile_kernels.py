"""Compile ahead what serving a model needs, so that no request waits for a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence

import torch

from octavo_kernels.apply_bitmask import mask_rows
from octavo_kernels.apply_penalties import penalize_rows
from octavo_kernels.attention_problem import attend, plan_units
from octavo_kernels.compute_logprobs import logprobs_rows
from octavo_kernels.copy_blocks import copy_pairs
from octavo_kernels.cpu import threads
from octavo_kernels.cpu.jit import KERNELS, Kernel, cache_can_be_written
from octavo_kernels.decoder import decode
from octavo_kernels.decoder_step import run_step
from octavo_kernels.embed_tokens import EMBED
from octavo_kernels.kv_write_problem import write as write_kernels
from octavo_kernels.multiply import MULTIPLY
from octavo_kernels.quantized_matmul import linear
from octavo_kernels.rms_norm import rms_norm_rows
from octavo_kernels.sample import sample_rows
from octavo_kernels.silu_and_mul import gated_rows

CompileProgress = Callable[[int, int], None]
"""Called with the number of the kernel that is compiled next, from 1, and of how many."""

# Below this, starting a second compiler (it imports torch and numba) takes longer than it saves.
_WORTH_A_HELPER = 4
_MAX_COMPILERS = 4


def serving_kernels(
    weight_kinds: Collection[str], cache_dtypes: Collection[torch.dtype]
) -> list[Kernel]:
    """List the CPU kernels that `Decoder` and the sampler run.

    The slowest to compile are first and last: two compilers start at the two ends.

    Args:
        weight_kinds: Kinds of all packed weights, embedding and head included.
        cache_dtypes: Types of the KV cache.
    """
    of_kinds = [
        kernel
        for kind in sorted(weight_kinds)
        for kernel in (MULTIPLY[kind], EMBED.get(kind))
        if kernel is not None
    ]
    return [
        *(attend[dtype] for dtype in cache_dtypes),
        *(*threads.TEAM_KERNELS, linear, plan_units),
        *of_kinds,
        *(copy_pairs, mask_rows, penalize_rows, logprobs_rows),
        *(decode, run_step, sample_rows),
    ]


def operation_kernels(cache_dtype: torch.dtype) -> list[Kernel]:
    """List the CPU kernels of a model whose layers run operation by operation, unpacked.

    Beside its products, which are torch's.
    """
    return [
        attend[cache_dtype],
        *(*threads.TEAM_KERNELS, plan_units, rms_norm_rows, gated_rows),
        *(write_kernels[cache_dtype], copy_pairs, mask_rows, penalize_rows, logprobs_rows),
        sample_rows,
    ]


def compile_kernels(kernels: Sequence[Kernel], progress: CompileProgress | None = None) -> int:
    """Compile those of `kernels` that this machine has not compiled before, and load all.

    What was compiled is kept in the user's cache folder for the next process. Where that
    can't be written it is kept in memory only, and a warning says so.

    Returns:
        How many were compiled.
    """
    missing = [kernel for kernel in kernels if not kernel.is_compiled]
    helpers = _start_helpers(missing)
    try:
        for kernel in missing:
            if not kernel.is_compiled:
                if progress is not None:
                    done = sum(other.is_compiled for other in missing)
                    progress(done + 1, len(missing))
                _ = kernel.address
    finally:
        for helper in helpers:
            helper.kill()  # whatever it has at hand is compiled here by now
            helper.wait()
    for kernel in kernels:
        _ = kernel.address
    return len(missing)


def _start_helpers(missing: Sequence[Kernel]) -> list[subprocess.Popen[bytes]]:
    """Start compilers that work through the list from other ends, one for each further core.

    LLVM is single-threaded and numba holds the GIL, so it takes processes. They share their
    work by the cache's files: whoever comes to a kernel that is there goes on to the next.
    """
    usable = threads.default_num_threads()
    count = min(usable, _MAX_COMPILERS, len(missing) // 2) - 1
    if len(missing) < _WORTH_A_HELPER or not cache_can_be_written():
        return []
    names = [kernel.name for kernel in missing][::-1]
    starts = [index * len(names) // max(count, 1) for index in range(count)]
    return [_start_helper([*names[start:], *names[:start]]) for start in starts]


def _start_helper(names: Sequence[str]) -> subprocess.Popen[bytes]:
    program = "import sys; from octavo_kernels.compile_kernels import help_out; help_out(sys.argv)"
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", program, *names],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,  # closed by our end, whatever ends us
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def help_out(arguments: Sequence[str]) -> None:
    """Be a helper: compile the kernels that are named, but those that are there by then."""

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    for name in arguments[1:]:
        if not KERNELS[name].is_compiled:
            _ = KERNELS[name].address
