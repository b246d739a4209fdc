"""The embedding of tokens, over whatever form its weight is kept in."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import embed_tokens
from octavo_worker.layers.weight import Weight


class Embedding:
    """Rows of a weight, by token.

    Args:
        weight: ``[vocab_size, hidden_size]``; packed, it is one part.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look ``[num_tokens]`` integers up: ``[num_tokens, hidden_size]``, new memory."""
        if isinstance(self.weight, Tensor):
            return torch.nn.functional.embedding(token_ids, self.weight)
        (whole,) = self.weight
        return embed_tokens(token_ids, whole)
