"""Log-probabilities of sampled tokens, and of a prompt's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_core.wire import TokenLogprobs
from octavo_kernels import compute_logprobs
from octavo_worker.input_batch import InputBatch

# What minus infinity is reported as, since JSON has no word for it.
MIN_LOGPROB = -9999.0

# Positions of a prompt whose logits exist at one time: 32 MiB with a vocabulary of 262,144.
PROMPT_ROWS = 32


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Report on one token a row.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, as the model gave them.
        token_ids: ``[num_rows]`` int64, the token of each row.
        num_top: ``[num_rows]``, how many of the likeliest tokens each row wants.
    """
    found = compute_logprobs(logits, token_ids, max(num_top))
    # The token itself first, then the likeliest ones; [num_rows, 1 + max(num_top)].
    ids = torch.cat((token_ids.unsqueeze(-1), found.top_token_ids), dim=-1).tolist()
    logprobs = torch.cat((found.sampled.unsqueeze(-1), found.top), dim=-1)
    values = logprobs.clamp_(min=MIN_LOGPROB).tolist()
    ranks = found.ranks.tolist()
    return [
        TokenLogprobs(ids[row][: 1 + count], values[row][: 1 + count], ranks[row])
        for row, count in enumerate(num_top)
    ]


def with_tokens(
    report: TokenLogprobs, logits: Tensor, token_ids: NDArray[np.int64]
) -> TokenLogprobs:
    """Add tokens that a request has named to a report on the sampled one alone.

    Args:
        logits: ``[vocab_size]`` float32, of the same row.
        token_ids: ``[num_tokens]``, within the vocabulary.
    """
    # What the softmax divides by is known from the sampled token.
    log_total = logits[report.token_ids[0]] - report.logprobs[0]
    values = logits[torch.from_numpy(token_ids).to(logits.device)] - log_total
    return TokenLogprobs(
        [report.token_ids[0], *token_ids.tolist()],
        [report.logprobs[0], *values.clamp_(min=MIN_LOGPROB).tolist()],
        report.rank,
    )


def prompt_logprobs(
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    batch: InputBatch,
    slots: NDArray[np.int64],
    query_start_loc: Sequence[int],
    starts: Sequence[int],
) -> dict[int, list[TokenLogprobs]]:
    """Report on the prompt tokens that follow those computed in a step.

    Args:
        hidden: ``[num_tokens, hidden_size]``, last hidden states of the step.
        compute_logits: From hidden states to ``[num_rows, vocab_size]``.
        batch: Tokens, and who wants a report, by slot.
        slots: ``[num_slots]``, as they were scheduled.
        query_start_loc: ``[num_slots + 1]``, where each slot's tokens begin in `hidden`.
        starts: ``[num_slots]``, position in its sequence of each slot's first token.

    Returns:
        By index into `slots`: the entry of position ``start + 1`` first. A step that computes
        the end of a prompt has one entry less than tokens.
    """
    reports: dict[int, list[TokenLogprobs]] = {}
    for index in np.flatnonzero(batch.num_prompt_logprobs[slots] >= 0).tolist():
        slot, start, first = int(slots[index]), starts[index], query_start_loc[index]
        end = start + query_start_loc[index + 1] - first
        # The last token's successor is none of the prompt.
        end = min(end, int(batch.num_prompt_tokens[slot]) - 1)
        following = torch.from_numpy(batch.token_ids[slot, start + 1 : end + 1].astype(np.int64))
        num_top = int(batch.num_prompt_logprobs[slot])
        entries: list[TokenLogprobs] = []
        for offset in range(0, end - start, PROMPT_ROWS):
            token_ids = following[offset : offset + PROMPT_ROWS].to(hidden.device)
            rows = hidden[first + offset : first + offset + len(token_ids)]
            entries += token_logprobs(compute_logits(rows), token_ids, [num_top] * len(token_ids))
        if entries:
            reports[index] = entries
    return reports
