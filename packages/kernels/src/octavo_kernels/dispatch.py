"""Which implementation of an operation takes a call."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor


def reference_forced() -> bool:
    """Whether ``OCTAVO_KERNELS=reference`` asks for the torch twins, for debugging."""
    return os.environ.get("OCTAVO_KERNELS") == "reference"


def use_cpu(*tensors: Tensor) -> bool:
    """Whether the compiled CPU kernels take these tensors: all there, and numba installed."""
    for tensor in tensors:
        if not tensor.is_cpu:
            return False
    return _has("numba") and not reference_forced()


def use_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels take this tensor: on a CUDA or ROCm device."""
    return tensor.is_cuda and triton_runs()


def triton_runs() -> bool:
    """Whether operations on a GPU are Triton kernels, which never wait for the host."""
    return _has("triton") and not reference_forced()


@cache
def _has(module: str) -> bool:
    """Whether a module is installed; it is not imported, which takes up to a second."""
    return find_spec(module) is not None
