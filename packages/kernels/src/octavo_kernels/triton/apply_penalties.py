"""Triton kernels of repetition, frequency and presence penalties."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.launch import next_power_of_2, on_device_of

# Tokens of a program: 8 for each of 128 threads.
COLUMNS = 1024

# Set in a token's count once the row has seen it; the bits below count it in the output.
_SEEN = tl.constexpr(1 << 30)


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Make seen tokens less likely, in place; see `octavo_kernels.apply_penalties`.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, its last dimension contiguous.
        token_ids: ``[num_rows, max_tokens]`` int32.
        num_prompt_tokens: ``[num_rows]`` int64.
        num_tokens: ``[num_rows]`` int64.
        repetition: ``[num_rows]`` float32.
        frequency: ``[num_rows]`` float32.
        presence: ``[num_rows]`` float32.
    """
    num_rows, vocab_size = logits.shape
    max_tokens = token_ids.shape[1]
    if num_rows == 0 or max_tokens == 0:
        return
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    block = min(COLUMNS, next_power_of_2(max_tokens))
    columns = min(COLUMNS, next_power_of_2(vocab_size))
    with on_device_of(logits):
        _count[(num_rows, -(-max_tokens // block))](
            *(token_ids, num_prompt_tokens, num_tokens, counts, vocab_size),
            *(token_ids.stride(0), token_ids.stride(1)),
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
        _penalize[(num_rows, -(-vocab_size // columns))](
            *(logits, counts, repetition, frequency, presence, vocab_size, logits.stride(0)),
            BLOCK=columns,
            num_warps=max(1, columns // 256),
        )


@triton.jit
def _count(
    token_ids,
    num_prompt_tokens,
    num_tokens,
    counts,
    vocab_size,
    row_stride,
    token_stride,
    BLOCK: tl.constexpr,
):
    """Integers add up to the same whatever the order of the atomics."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = index < tl.load(num_tokens + row)
    token = tl.load(token_ids + row * row_stride + index * token_stride, mask=known, other=-1)
    known = known & (token >= 0) & (token < vocab_size)
    of_row = counts + row * vocab_size
    tl.atomic_or(of_row + token, _SEEN, mask=known, sem="relaxed")
    output = known & (index >= tl.load(num_prompt_tokens + row))
    tl.atomic_add(of_row + token, 1, mask=output, sem="relaxed")


@triton.jit
def _penalize(
    logits,
    counts,
    repetition,
    frequency,
    presence,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + row * vocab_size + token, mask=token < vocab_size, other=0)
    seen = count >= _SEEN
    in_output = count & (_SEEN - 1)
    to = logits + row * logits_stride + token
    x = tl.load(to, mask=seen, other=0.0)
    factor = tl.load(repetition + row)
    x = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
    x = x - tl.load(frequency + row) * in_output.to(tl.float32)
    x = x - tl.where(in_output > 0, tl.load(presence + row), 0.0)
    tl.store(to, x, mask=seen)
