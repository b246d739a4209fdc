"""Log-probabilities of sampled tokens and of their alternatives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.dispatch import use_cpu
from octavo_kernels.row_scratch import row_scratch, run_rows

MOST_ON_CPU = 64
"""More alternatives than this are left to torch's sort."""

logprobs_rows = Kernel("sampling.logprobs_rows", "q")


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities, by row.

    Attributes:
        sampled: ``[num_rows]`` float32, of the sampled tokens.
        ranks: ``[num_rows]`` int64, 1 for the likeliest token.
        top_token_ids: ``[num_rows, num_top]`` int64, likeliest first.
        top: ``[num_rows, num_top]`` float32, of ``top_token_ids``.
    """

    sampled: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top: Tensor


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Compute log-probabilities from logits as the model gave them.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        token_ids: ``[num_rows]`` int64, the sampled tokens.
        num_top: How many of the likeliest tokens to report, 0 or more; at most the
            vocabulary is reported.
    """
    num_top = min(num_top, logits.shape[-1])
    fits = logits.dtype == torch.float32 and num_top <= MOST_ON_CPU
    if use_cpu(logits, token_ids) and fits:
        return _compute_on_cpu(logits, token_ids, num_top)
    return compute_logprobs_reference(logits, token_ids, num_top)


def _compute_on_cpu(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    num_rows, vocab_size = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    token_ids = token_ids.to(torch.int64).contiguous()
    found = Logprobs(
        torch.empty(num_rows),
        torch.empty(num_rows, dtype=torch.int64),
        torch.empty(num_rows, num_top, dtype=torch.int64),
        torch.empty(num_rows, num_top),
    )
    scratch = row_scratch(vocab_size)
    words = torch.tensor(
        [
            *(logits.data_ptr(), 4 * logits.stride(0), num_rows, vocab_size, token_ids.data_ptr()),
            *(num_top, found.sampled.data_ptr(), found.ranks.data_ptr()),
            *(found.top_token_ids.data_ptr(), found.top.data_ptr(), 0),
            *(scratch.data_ptr(), scratch.stride(0)),
        ]
    )
    run_rows(logprobs_rows, num_rows, words)
    return found


def compute_logprobs_reference(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Do the same in plain torch."""
    logprobs = logits.log_softmax(dim=-1)
    sampled = logprobs.gather(-1, token_ids.unsqueeze(-1))  # [num_rows, 1]
    # By logits: two that differ may round to the same log-probability.
    ranks = (logits > logits.gather(-1, token_ids.unsqueeze(-1))).sum(dim=-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(sampled.squeeze(-1), ranks, top.indices, top.values)
