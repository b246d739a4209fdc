"""The bodies of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from octavo_server.api.chat_protocol import (
    ChatMessage,
)
from octavo_server.api.protocol import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    InvalidField,
    Name,
    StrictModel,
    TemplateOptions,
    Text,
    TokenId,
)


class TokenizeRequest(StrictModel):
    """Body of ``POST /tokenize``: a prompt, or messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def check_form(self) -> TokenizeRequest:
        """Refuse bodies with both or neither, and what would do nothing for messages."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidField("give either prompt or messages", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidField(
                "add_special_tokens is true; a chat template writes them itself",
                "add_special_tokens",
            )
        return self


class DetokenizeRequest(StrictModel):
    """Body of ``POST /detokenize``."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS)]
