"""What a server answers, typed. Fields that a newer server adds are skipped.

Times are seconds since the epoch; log-probabilities are natural logs.
"""

from __future__ import annotations

import base64
import sys
from array import array

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a request took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One text's vector, as the server sent it."""

    index: int = 0
    embedding: list[float] | str = []

    @property
    def vector(self) -> list[float]:
        """The numbers, whether they came as such or as base64."""
        if isinstance(self.embedding, list):
            return self.embedding
        values = array("f")
        values.frombytes(base64.b64decode(self.embedding))
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `embeddings`."""

    model: str = ""
    data: list[Embedding] = []
    usage: Usage | None = None

    @property
    def vectors(self) -> list[list[float]]:
        """One vector for each text, in their order."""
        return [item.vector for item in self.data]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How well one pair of texts fits."""

    index: int = 0
    score: float = 0.0


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `score`."""

    model: str = ""
    data: list[Score] = []
    usage: Usage | None = None


class RankedText(msgspec.Struct, frozen=True, kw_only=True):
    """A document's text."""

    text: str = ""


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document's place in the request, and how well it fits."""

    index: int = 0
    relevance_score: float = 0.0
    document: RankedText | None = None


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `rerank`, the best document first."""

    id: str = ""
    model: str = ""
    results: list[RankedDocument] = []
    usage: Usage | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion, one entry for each token in every list."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, or in a stream what one step added to it.

    Attributes:
        finish_reason: ``stop`` or ``length``; None while the text goes on.
        stop_reason: The stop string or token id that ended it.
        token_ids: Only with the option ``return_token_ids``.
    """

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `complete`, and each chunk of `stream_complete`.

    The last chunk has no choices when it carries the usage.
    """

    id: str = ""
    model: str = ""
    created: int = 0
    choices: list[CompletionChoice] = []
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text if self.choices else ""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that could have come at a position, and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """The token that did come, and the likeliest ones in order."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat answer, one entry for each token."""

    content: list[TokenLogprob] | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An assistant's message."""

    role: str = "assistant"
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        finish_reason: ``stop`` or ``length``.
        stop_reason: The stop string or token id that ended it.
        token_ids: Only with the option ``return_token_ids``.
    """

    message: ChatMessage
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `chat`."""

    choices: list[ChatChoice]
    id: str = ""
    model: str = ""
    created: int = 0
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return (self.choices[0].message.content or "") if self.choices else ""


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to a message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one choice; ``finish_reason`` is set in the last chunk only."""

    delta: ChatDelta
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of `stream_chat`. The last one has no choices when it carries the usage."""

    id: str = ""
    model: str = ""
    created: int = 0
    choices: list[ChatChunkChoice] = []
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """Text that this chunk adds to the first choice."""
        return (self.choices[0].delta.content or "") if self.choices else ""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the server answers for.

    Attributes:
        max_model_len: Most tokens of prompt and answer together.
    """

    id: str
    created: int = 0
    owned_by: str = ""
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /v1/models``."""

    data: list[Model]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a server takes requests, and how far its start-up is if it does not.

    Attributes:
        status: HTTP status of the answer, 0 if there was none.
        stage: What it is doing, in words.
        progress: Share of that stage that is done, 0 to 1.
    """

    ready: bool = False
    status: int = 0
    stage: str | None = None
    progress: float | None = None
