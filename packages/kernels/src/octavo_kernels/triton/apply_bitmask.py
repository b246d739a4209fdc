"""Triton kernel that applies the bitmask of a grammar."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.launch import next_power_of_2, on_device_of

# Tokens of a program: 8 for each of 128 threads, and 32 words.
COLUMNS = 1024


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Forbid the tokens whose bit is 0, in place; see `octavo_kernels.apply_bitmask`.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, its last dimension contiguous.
        bitmask: ``[num_masked_rows, num_words]`` int32.
        rows: ``[num_masked_rows]`` int64.
    """
    if len(rows) == 0 or logits.shape[1] == 0:
        return
    vocab_size = logits.shape[1]
    block = min(COLUMNS, next_power_of_2(vocab_size))
    with on_device_of(logits):
        _mask[(len(rows), -(-vocab_size // block))](
            *(logits, bitmask, rows, vocab_size, bitmask.shape[1]),
            *(logits.stride(0), bitmask.stride(0), bitmask.stride(1)),
            BLOCK=block,
            num_warps=max(1, block // 256),
        )


@triton.jit
def _mask(
    logits,
    bitmask,
    rows,
    vocab_size,
    num_words,
    logits_stride,
    mask_row_stride,
    mask_word_stride,
    BLOCK: tl.constexpr,
):
    masked = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word_at = token // 32
    words = tl.load(
        bitmask + masked * mask_row_stride + word_at * mask_word_stride,
        mask=word_at < num_words,
        other=0,
    )
    forbidden = (words >> (token % 32)) & 1 == 0
    row = tl.load(rows + masked).to(tl.int64)
    to = logits + row * logits_stride + token
    tl.store(to, token * 0.0 + float("-inf"), mask=forbidden & (token < vocab_size))
