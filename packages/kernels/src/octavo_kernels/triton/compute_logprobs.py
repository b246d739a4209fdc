"""Triton kernel of log-probabilities and ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.compute_logprobs import Logprobs
from octavo_kernels.triton.launch import next_power_of_2, on_device_of, with_dense_rows

# Logits of a row at once: 16 for each of 256 threads.
COLUMNS = 4096


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Compute log-probabilities; see `octavo_kernels.compute_logprobs`.

    The likeliest tokens are chosen by torch, from the logits: no array of the vocabulary's
    size is written.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        token_ids: ``[num_rows]`` int64.
        num_top: Likeliest tokens to report.
    """
    num_rows, vocab_size = logits.shape
    logits = with_dense_rows(logits)
    log_total = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    sampled = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows > 0:
        block = min(COLUMNS, max(16, next_power_of_2(vocab_size)))
        with on_device_of(logits):
            _logprobs[(num_rows,)](
                *(logits, token_ids, log_total, sampled, ranks, vocab_size, logits.stride(0)),
                BLOCK=block,
                num_warps=max(1, block // 512),
            )
    top = logits.topk(min(num_top, vocab_size), dim=-1)
    return Logprobs(sampled, ranks, top.indices, top.values - log_total.unsqueeze(1))


@triton.jit
def _logprobs(
    logits,
    token_ids,
    log_total,
    sampled,
    ranks,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
):
    """One program reads one row once, with a running maximum for each lane."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * logits_stride
    own = tl.load(row_logits + tl.load(token_ids + row))
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    higher = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + at, mask=at < vocab_size, other=float("-inf"))
        new_largest = tl.maximum(largest, x)
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - finite) + tl.exp(x - finite)
        largest = new_largest
        higher += (x > own).to(tl.int32)
    row_largest = tl.max(largest, 0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), 0)
    log_sum = row_largest + tl.log(row_total)
    tl.store(log_total + row, log_sum)
    tl.store(sampled + row, own - log_sum)
    tl.store(ranks + row, (tl.sum(higher, 0) + 1).to(tl.int64))
