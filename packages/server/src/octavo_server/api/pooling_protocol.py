"""The bodies of the routes of pooling models, bounded like those of `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from octavo_server.api.protocol import (
    MAX_INT32,
    MAX_INT64,
    MAX_NAME_CHARS,
    MAX_TIMEOUT,
    Body,
    InvalidField,
    Name,
    RequestId,
    StrictModel,
    Text,
    TokenIds,
    form_of_prompt,
    one_of,
    text_or_list,
)
from octavo_server.pooling_input_processor import PoolingOptions

MAX_TEXTS = 2048  # OpenAI's
MAX_DIMENSIONS = 65536

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
TextInput = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS), Tag("<lists of ids>")],
    one_of(form_of_prompt, "a string, a list of token ids, or a list of either"),
]
TextOrTexts = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[Texts, Tag("<list>")],
    one_of(text_or_list, "a string or a list of strings"),
]
EncodingFormat = Literal["float", "base64"]

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": (False,),
    "chat_template": (),
    "mm_processor_kwargs": (),
}


class PoolingBody(Body):
    """The fields that all these routes share."""

    unsupported = _UNSUPPORTED

    model: Name | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None
    request_id: RequestId | None = None

    def options(self) -> PoolingOptions:
        """Return what the body says about its texts."""
        return PoolingOptions(
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "right",
            add_special_tokens=self.add_special_tokens is not False,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            tenant=self.safety_identifier or self.user or None,
        )


class TextBody(PoolingBody):
    """A body with texts that stand each for itself."""

    input: TextInput

    def texts(self) -> dict[str, str | list[int]]:
        """Return the texts one by one, whichever form they came in, by what errors call them."""
        if isinstance(self.input, str):
            return {"input": self.input}
        if isinstance(self.input[0], int):
            return {"input": self.input}
        texts: list[str | list[int]] = list(self.input)
        return {f"input[{number}]": text for number, text in enumerate(texts)}


class EmbeddingRequest(TextBody):
    """Body of ``POST /v1/embeddings``."""

    encoding_format: EncodingFormat | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    normalize: bool | None = None


class PoolingRequest(EmbeddingRequest):
    """Body of ``POST /pooling``."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassificationRequest(TextBody):
    """Body of ``POST /classify``."""


class ScoreRequest(PoolingBody):
    """Body of ``POST /score``: two texts, one and several, or as many of both.

    The two have four pairs of names.
    """

    unsupported = _UNSUPPORTED | {"instruction": ()}

    text_1: TextOrTexts | None = None
    text_2: TextOrTexts | None = None
    queries: TextOrTexts | None = None
    documents: TextOrTexts | None = None
    items: TextOrTexts | None = None
    data_1: TextOrTexts | None = None
    data_2: TextOrTexts | None = None

    @model_validator(mode="after")
    def check_pairs(self) -> ScoreRequest:
        """Refuse a body without two sides, and sides that make no pairs."""
        given = [
            names for names in _SIDES if all(getattr(self, name) is not None for name in names)
        ]
        if len(given) != 1:
            raise InvalidField(
                f"give one of the pairs {', '.join(f'{a} and {b}' for a, b in _SIDES)}",
                "text_1",
            )
        first, second = (1 if isinstance(side, str) else len(side) for side in self.sides())
        if first not in (1, second):
            name_1, name_2 = self.names()
            raise InvalidField(
                f"{name_1} has {first} texts and {name_2} has {second}; they must be "
                f"1 and 1, 1 and N, or N and N",
                name_1,
            )
        return self

    def names(self) -> tuple[str, str]:
        """Return what the body calls its two sides."""
        return next(
            names for names in _SIDES if all(getattr(self, name) is not None for name in names)
        )

    def sides(self) -> tuple[str | list[str], str | list[str]]:
        """Return both sides as they came."""
        first, second = (getattr(self, name) for name in self.names())
        return first, second


_SIDES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


class RerankDocument(StrictModel):
    """A document as an object."""

    text: Text


def _text_or_object(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else None


Document = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[RerankDocument, Tag("<object>")],
    one_of(_text_or_object, "a string or an object with a text"),
]


class RerankRequest(PoolingBody):
    """Body of ``POST /rerank``, in the shapes of Jina and of Cohere."""

    unsupported = _UNSUPPORTED | {"instruction": (), "rank_fields": ()}

    query: Text
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None

    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [item if isinstance(item, str) else item.text for item in self.documents]
