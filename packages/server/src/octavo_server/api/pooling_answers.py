"""The shapes of the answers of pooling models, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from octavo_server.api.answers import Answer, PromptTokensDetails


class PoolingUsage(Answer):
    """Counts of tokens; nothing is generated."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PoolingList(Answer):
    """What the answers with a list have in common."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage


class Embedding(Answer):
    """A text's vector: numbers, or the base64 of little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingAnswer(PoolingList):
    """Answer of ``/v1/embeddings``."""

    data: list[Embedding]


class PooledText(Answer):
    """A text's vector, or one for each of its tokens."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingAnswer(PoolingList):
    """Answer of ``/pooling``."""

    data: list[PooledText]


class Classification(Answer):
    """A text's likeliest class, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationAnswer(PoolingList):
    """Answer of ``/classify``."""

    data: list[Classification]


class Score(Answer):
    """How well a pair fits."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(PoolingList):
    """Answer of ``/score``."""

    data: list[Score]


class DocumentText(Answer):
    """A document."""

    text: str


class RerankResult(Answer):
    """A document's place in the request, and how well it fits."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankAnswer(Answer):
    """Answer of ``/rerank``."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
