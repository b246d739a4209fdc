"""The bodies of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from octavo_server.api.chat_protocol import ChatMessage, Tool, check_final_message
from octavo_server.api.protocol import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    MAX_TOOLS,
    Body,
    InvalidField,
    Name,
    StrictModel,
    TemplateOptions,
    Text,
    TokenId,
)


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``: a prompt, or messages."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": (),
        "media_io_kwargs": (),
    }

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
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
        if self.messages is not None and self.continue_final_message:
            check_final_message(self.messages[-1], self.add_generation_prompt)
        return self


class DetokenizeRequest(StrictModel):
    """Body of ``POST /detokenize``."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS)]
