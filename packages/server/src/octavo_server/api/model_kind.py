"""Which APIs a kind of model answers: one that generates no embeddings, and the other way."""

from __future__ import annotations

from collections.abc import Mapping

from octavo_core.pooler_spec import PoolerSpec

# Paths to the names that vLLM's messages have for them.
_GENERATION = {
    "/v1/chat/completions": "Chat Completions",
    "/v1/completions": "Completions",
    "/v1/responses": "Responses",
    "/v1/responses/input_tokens": "Responses",
    "/v1/messages": "Messages",
    "/v1/messages/count_tokens": "Messages",
}
_EMBEDDING = {"/v1/embeddings": "Embeddings"}
_CLASSIFICATION = {"/classify": "Classification"}
_SCORING = {
    "/score": "Score",
    "/v1/score": "Score",
    "/rerank": "Rerank (Score)",
    "/v1/rerank": "Rerank (Score)",
    "/v2/rerank": "Rerank (Score)",
}
_ANY_POOLING = {"/pooling": "Pooling"}


def refused_apis(pooler: PoolerSpec | None) -> Mapping[str, str]:
    """Return the paths that a model can't answer on, and what to say there.

    Args:
        pooler: What the model pools; None for one that generates text.
    """
    if pooler is None:
        why = "it generates text; for embeddings, start the server with --runner pooling"
        return _messages(_EMBEDDING | _CLASSIFICATION | _SCORING | _ANY_POOLING, why)
    if not pooler.is_classifier:
        return _messages(_GENERATION | _CLASSIFICATION, "it makes embeddings of texts")
    num_labels = len(pooler.labels)
    if num_labels == 1:
        return _messages(_GENERATION | _EMBEDDING, "it scores texts")
    why = f"it scores texts for {num_labels} classes"
    return _messages(_GENERATION | _EMBEDDING | _SCORING, why)


def _messages(apis: Mapping[str, str], why: str) -> dict[str, str]:
    return {path: f"The model does not support {api} API: {why}." for path, api in apis.items()}
