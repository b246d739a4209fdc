"""What the CPU kernels over rows of logits share on Python's side."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads

_SORTED_BYTES = 64 + 8 * 64
"""The prefix and the tokens that are sorted, see `octavo_kernels.cpu.sampling`."""


def row_scratch(vocab_size: int) -> Tensor:
    """Allocate ``[num_threads, num_bytes]`` uint8 for two copies of a row each."""
    row_bytes = 4 * ((vocab_size + 7) // 8 * 8)
    num_bytes = -(-(_SORTED_BYTES + 2 * row_bytes) // 64) * 64
    return torch.empty(get_num_threads(), num_bytes, dtype=torch.uint8)


def run_rows(kernel: Kernel, num_rows: int, words: Tensor) -> None:
    """Run a kernel whose chunks are rows: a single one needs no second thread."""
    if num_rows == 1:
        kernel.alone(words.data_ptr())
    elif num_rows:
        kernel(words.data_ptr())
