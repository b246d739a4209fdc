"""Log-probabilities of sampled tokens and of their alternatives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
    return compute_logprobs_reference(logits, token_ids, num_top)


def compute_logprobs_reference(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Do the same in plain torch."""
    logprobs = logits.log_softmax(dim=-1)
    sampled = logprobs.gather(-1, token_ids.unsqueeze(-1))  # [num_rows, 1]
    # By logits: two that differ may round to the same log-probability.
    ranks = (logits > logits.gather(-1, token_ids.unsqueeze(-1))).sum(dim=-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs(sampled.squeeze(-1), ranks, top.indices, top.values)
