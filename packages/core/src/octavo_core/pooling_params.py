"""What a pooling request asks for, and what comes back: vectors in place of tokens.

Here as in the field, pooling is everything that a model computes of a text and does not say in
tokens: an embedding, the scores of classes, or a vector for each token.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How one text is pooled.

    Attributes:
        task: ``embed`` and ``classify`` make one vector of the text, ``token_embed`` and
            ``token_classify`` one of each token.
        dimensions: Keep this many numbers of an embedding (Kusupati et al. 2022, arXiv
            2205.13147); None keeps all.
        use_activation: Bring embeddings to a length of one, or scores of classes to
            probabilities; None does what the model was made for.
        second_segment: Position where the second text of a pair begins, for encoders that
            tell the two apart; 0 means that there is but one.
        needs_all_tokens: The hidden states of all tokens count, so none may be skipped
            because its K and V are cached.
    """

    task: PoolingTask = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None
    second_segment: int = 0
    needs_all_tokens: bool = False

    @property
    def is_per_token(self) -> bool:
        """Whether there is a vector for each token."""
        return self.task in ("token_embed", "token_classify")


class PooledOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was pooled of one text.

    Attributes:
        shape: ``[size]``, or ``[num_tokens, size]`` with a vector for each token.
        data: The numbers, row by row, as little-endian float32.
    """

    shape: list[int]
    data: bytes
