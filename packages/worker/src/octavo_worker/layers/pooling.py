"""From the hidden states of a text's tokens to one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["last", "mean", "cls"]

_POOLINGS: dict[Pooling, Callable[[Tensor], Tensor]] = {
    "last": lambda hidden: hidden[-1],
    "mean": lambda hidden: hidden.mean(dim=0),
    "cls": lambda hidden: hidden[0],
}


def pool(
    hidden: Tensor, lengths: Sequence[int], pooling: Pooling, *, normalize: bool = True
) -> Tensor:
    """Make one vector of each text.

    Args:
        hidden: ``[num_tokens, hidden_size]``, one text after the other.
        lengths: Tokens of each text, at least one.
        pooling: ``last`` and ``cls`` take the last and the first token, ``mean`` all.
        normalize: Whether vectors are brought to a length of one.

    Returns:
        ``[num_texts, hidden_size]`` float32.
    """
    take = _POOLINGS[pooling]
    texts = torch.split(hidden.float(), list(lengths))
    vectors = torch.stack([take(text) for text in texts])
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors
