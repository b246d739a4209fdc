"""The bitmask of a grammar: which tokens may come next."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.dispatch import use_cpu
from octavo_kernels.row_scratch import run_rows

mask_rows = Kernel("adjust_logits.mask_rows", "q")

BITS = 32
"""Tokens in one word of a bitmask."""


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity, in place.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        bitmask: ``[num_masked_rows, num_words]`` int32; bit ``i`` of word ``j``, counted
            from the lowest, is token ``32 j + i``. Tokens beyond the last word are forbidden.
        rows: ``[num_masked_rows]`` int64, the row of `logits` that each mask is for.

    Raises:
        ValueError: There is not one mask for each of `rows`, or its type is wrong.
    """
    if bitmask.dtype != torch.int32 or bitmask.dim() != 2 or len(bitmask) != len(rows):
        raise ValueError(
            f"bitmask must be int32 of [{len(rows)}, num_words], not {bitmask.dtype} of "
            f"{list(bitmask.shape)}"
        )
    if use_cpu(logits, bitmask) and logits.dtype == torch.float32 and logits.stride(-1) == 1:
        rows, bitmask = rows.to(torch.int64).contiguous(), bitmask.contiguous()
        words = torch.tensor(
            [
                *(logits.data_ptr(), 4 * logits.stride(0), len(rows), logits.shape[1]),
                *(bitmask.data_ptr(), bitmask.shape[1], rows.data_ptr()),
            ]
        )
        run_rows(mask_rows, len(rows), words)
        return
    apply_bitmask_reference(logits, bitmask, rows)


def apply_bitmask_reference(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Do the same in plain torch."""
    shifts = torch.arange(BITS, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask.unsqueeze(-1) >> shifts & 1).bool().flatten(1)  # [num_masked_rows, ...]
    covered = min(allowed.shape[1], logits.shape[1])
    forbidden = torch.ones(len(rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    forbidden[:, :covered] = ~allowed[:, :covered]
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
