"""The embedding of tokens, over whatever form its weight is kept in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo_kernels import embed_tokens
from octavo_worker.layers.parallel_weights import ParallelWeights
from octavo_worker.layers.weight import Weight
from octavo_worker.parallel_state import ParallelGroup


class Embedding:
    """Rows of a weight, by token.

    Args:
        weight: ``[vocab_size, hidden_size]``; packed, it is one part.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    @classmethod
    def of(cls, weights: Mapping[str, Weight], name: str) -> Embedding:
        """Take a worker's embedding from its loaded weights, whatever part of it they have."""
        if not isinstance(weights, ParallelWeights):
            return cls(weights[name])
        if name not in weights:
            return HiddenStatesBefore()
        return VocabularyEmbedding(weights[name], weights.vocabulary, weights.group)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look ``[num_tokens]`` integers up: ``[num_tokens, hidden_size]``, new memory."""
        if isinstance(self.weight, Tensor):
            return torch.nn.functional.embedding(token_ids, self.weight)
        (whole,) = self.weight
        return embed_tokens(token_ids, whole)


class VocabularyEmbedding(Embedding):
    """The embedding of some tokens; other workers have the others.

    Args:
        weight: ``[len(vocabulary), hidden_size]``.
        vocabulary: Its tokens.
        group: The other workers.
    """

    def __init__(self, weight: Weight, vocabulary: range, group: ParallelGroup) -> None:
        super().__init__(weight)
        self._vocabulary = vocabulary
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look the tokens up that are here, and get the others' rows."""
        first, last = self._vocabulary.start, self._vocabulary.stop
        is_elsewhere = (token_ids < first) | (token_ids >= last)
        rows = super().__call__((token_ids - first).masked_fill(is_elsewhere, 0))
        # All but one of those added up are zero, so the sum is exact.
        return self._group.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(-1), 0))


class HiddenStatesBefore(Embedding):
    """Stands in for the embedding on later stages of a pipeline.

    Their input in place of tokens is what the stage before has computed.
    """

    def __init__(self) -> None:
        pass

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return ``[num_tokens, hidden_size]`` as it came."""
        return token_ids
