"""Single tokens that are favoured, forbidden, or the only ones allowed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenEntries(NamedTuple):
    """Pairs of a row and a token, in any order.

    Attributes:
        rows: ``[num_entries]`` int64.
        token_ids: ``[num_entries]`` int64.
    """

    rows: Tensor
    token_ids: Tensor


def mask_logits(
    logits: Tensor,
    *,
    bias: tuple[TokenEntries, Tensor] | None = None,
    allowed: TokenEntries | None = None,
    forbidden: TokenEntries | None = None,
) -> None:
    """Add to, keep or forbid single logits, in place and in that order.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        bias: Entries, and ``[num_entries]`` float32 to add to their logits; entries that are
            there twice add up.
        allowed: Rows that occur here keep these tokens only; all others become minus infinity.
        forbidden: These tokens become minus infinity: bad words, or ends that come too early.
    """
    if bias is not None:
        entries, values = bias
        logits.index_put_(tuple(entries), values, accumulate=True)
    if allowed is not None:
        kept = logits[allowed.rows, allowed.token_ids]
        logits[allowed.rows] = -torch.inf
        logits[allowed.rows, allowed.token_ids] = kept
    if forbidden is not None:
        logits[forbidden.rows, forbidden.token_ids] = -torch.inf
