"""Compile ahead what serving a model needs, so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from octavo_kernels.apply_bitmask import mask_rows
from octavo_kernels.attention_problem import attend, plan_units
from octavo_kernels.compute_logprobs import logprobs_rows
from octavo_kernels.copy_blocks import copy_pairs
from octavo_kernels.cpu import threads
from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.decoder import decode
from octavo_kernels.embed_tokens import EMBED
from octavo_kernels.multiply import MULTIPLY
from octavo_kernels.quantized_matmul import linear
from octavo_kernels.sample import sample_rows

CompileProgress = Callable[[int, int], None]
"""Called with the number of the kernel that is compiled next, from 1, and of how many."""


def serving_kernels(weight_kinds: Collection[str], cache_dtype: torch.dtype) -> list[Kernel]:
    """List the CPU kernels that `Decoder` and the sampler run.

    Args:
        weight_kinds: Kinds of all packed weights, embedding and head included.
        cache_dtype: Type of the KV cache.
    """
    of_kinds = [
        kernel
        for kind in sorted(weight_kinds)
        for kernel in (MULTIPLY[kind], EMBED.get(kind))
        if kernel is not None
    ]
    return [
        *threads.TEAM_KERNELS,
        *(decode, linear, plan_units, attend[cache_dtype]),
        *of_kinds,
        *(sample_rows, logprobs_rows, mask_rows, copy_pairs),
    ]


def compile_kernels(kernels: Sequence[Kernel], progress: CompileProgress | None = None) -> int:
    """Compile those of `kernels` that this machine has not compiled before, and load all.

    What was compiled is kept in the user's cache folder for the next process. Where that
    can't be written it is kept in memory only; `octavo_kernels.cpu.jit` warns of it.

    Returns:
        How many were compiled.
    """
    missing = [kernel for kernel in kernels if not kernel.is_compiled]
    for number, kernel in enumerate(missing, 1):
        if progress is not None:
            progress(number, len(missing))
        _ = kernel.address
    for kernel in kernels:
        _ = kernel.address
    return len(missing)
