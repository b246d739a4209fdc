"""What `LLM` gives back for texts that are pooled, under vLLM's names."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

Output = TypeVar("Output")


class PooledVectors(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers as the model made them.

    Attributes:
        data: One vector, or one for each token.
    """

    data: list[float] | list[list[float]]


class EmbeddingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A text's vector."""

    embedding: list[float]


class ClassificationOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A text's classes.

    Attributes:
        label: Name of the likeliest.
        probs: Probability of each, in the order of the model's ``id2label``.
    """

    label: str
    probs: list[float]


class ScoringOutput(msgspec.Struct, frozen=True, kw_only=True):
    """How well two texts fit."""

    score: float


class PoolingRequestOutput(msgspec.Struct, Generic[Output], frozen=True, kw_only=True):
    """A text, or a pair, and what was made of it.

    Attributes:
        prompt_token_ids: Its tokens; of two texts that were pooled apart, both's.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: Output
