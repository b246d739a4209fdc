"""From the hidden states of a text's tokens to vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from octavo_core.pooler_spec import PoolerSpec, PoolingType, ScoreActivation
from octavo_core.pooling_params import PooledOutput, PoolingParams
from octavo_worker.layers.classification_heads import Head

_ACTIVATIONS: dict[ScoreActivation, Callable[[Tensor], Tensor]] = {
    "identity": lambda scores: scores,
    "sigmoid": torch.sigmoid,
    "softmax": lambda scores: torch.softmax(scores, dim=-1),
    "tanh": torch.tanh,
}


def condense(hidden: Tensor, pooling: PoolingType) -> Tensor:
    """Keep of one piece of a text what its vector will be made of.

    Args:
        hidden: ``[num_tokens, hidden_size]``, the piece's.
        pooling: Which tokens count.

    Returns:
        ``[1, hidden_size]`` float32.
    """
    if pooling == "mean":
        return hidden.float().sum(dim=0, keepdim=True)
    row = hidden[-1:] if pooling == "last" else hidden[:1]
    return row.float()


def combine(pieces: Sequence[Tensor], pooling: PoolingType, num_tokens: int) -> Tensor:
    """Make a text's vector of what `condense` has kept of its pieces.

    Args:
        pieces: In their order; they cover the text, or its end if the last token alone counts.
        pooling: Which tokens count.
        num_tokens: Of the whole text.

    Returns:
        ``[1, hidden_size]`` float32.
    """
    if pooling == "mean":
        total = pieces[0] if len(pieces) == 1 else torch.stack(list(pieces)).sum(dim=0)
        return total / num_tokens
    return pieces[-1] if pooling == "last" else pieces[0]


def pool(
    hidden: Tensor, lengths: Sequence[int], pooling: PoolingType, *, normalize: bool = True
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
    texts = torch.split(hidden, list(lengths))
    vectors = torch.cat([combine([condense(text, pooling)], pooling, len(text)) for text in texts])
    return functional.normalize(vectors, dim=-1) if normalize else vectors


class Pooler:
    """The last step of a pooling model, on rows of hidden states.

    Args:
        spec: What the model is made for.
        head: Scores classes; None for a model that makes embeddings.
    """

    def __init__(self, spec: PoolerSpec, head: Head | None) -> None:
        self.spec = spec
        self._head = head

    def finish(self, rows: Tensor, params: PoolingParams) -> Tensor:
        """Compute what a request asked for.

        Args:
            rows: ``[num_rows, hidden_size]`` float32: one row, or one for each token.
            params: Of the request.

        Returns:
            ``[num_rows, size]`` float32.
        """
        if self._head is not None:
            scores = self._head(rows).float()
            if params.use_activation is False:
                return scores
            return _ACTIVATIONS[self.spec.activation](scores)
        if params.dimensions is not None:
            rows = rows[:, : params.dimensions]
        use = self.spec.normalize if params.use_activation is None else params.use_activation
        return functional.normalize(rows, dim=-1) if use else rows


def to_output(rows: Tensor, params: PoolingParams) -> PooledOutput:
    """Put ``[num_rows, size]`` float32 in the wire's terms."""
    shape = list(rows.shape) if params.is_per_token else [rows.shape[1]]
    return PooledOutput(shape, rows.cpu().numpy().astype("<f4").tobytes())
