"""The bodies that clients may send. Every field has its bounds here, and only here.

Names are OpenAI's, and vLLM's where it extends them. Validation is strict: ``"1"`` is
no number and ``1`` no boolean. A field of OpenAI's API that does nothing here yet is
refused by name unless it asks for nothing; a field that nobody knows is ignored, since
SDKs send more than the API page lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from octavo_core.errors import InvalidRequestError
from octavo_core.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_TEXT_CHARS = 16 * 1024 * 1024
MAX_NAME_CHARS = 1024
MAX_PROMPTS = 1024
MAX_PROMPT_TOKENS = 4 * 1024 * 1024
MAX_MESSAGES = 16384
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128
MAX_TEMPLATE_OPTIONS = 64
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_TIMEOUT = 7 * 86400  # seconds

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
NumTokens = Annotated[int, Field(ge=0, le=MAX_INT32)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
Integer = Annotated[int, Field(ge=-MAX_INT64, le=MAX_INT64)]

# Each union says which branch a value is meant for, so that an error tells what is wrong
# there. Tags stand in angle brackets, by which errors tell them from fields.


def _form_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    match value[:1]:
        case [str()]:
            return "<texts>"
        case [list()]:
            return "<lists of ids>"
        case _:
            return "<ids>"


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def _form_of_option(value: Any) -> str | None:
    # Not isinstance: to it, a bool is an int.
    return {bool: "<bool>", int: "<int>", float: "<float>", str: "<str>"}.get(type(value))


def _one_of(form: Callable[[Any], str | None], wanted: str) -> Discriminator:
    return Discriminator(
        form, custom_error_type="form", custom_error_message=f"input should be {wanted}"
    )


Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<lists of ids>")],
    _one_of(_form_of_prompt, "a string, a list of token ids, or a list of either"),
]

Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<list>")],
    _one_of(_text_or_list, "a string or a list of strings"),
]

TemplateOption = Annotated[
    Annotated[bool, Tag("<bool>")]
    | Annotated[Integer, Tag("<int>")]
    | Annotated[Number, Tag("<float>")]
    | Annotated[str, Field(max_length=MAX_NAME_CHARS), Tag("<str>")],
    _one_of(_form_of_option, "a string, a number, a boolean or null"),
]

# Fields of OpenAI's and vLLM's APIs to the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "logits_processors": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "typical_p": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "reasoning": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "enable_thinking": (),  # a variable of templates: it belongs into chat_template_kwargs
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "vllm_xargs": ({},),
}


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    # To Python, True is 1 and False is 0.
    is_bool = isinstance(value, bool)
    return any(value == item and is_bool == isinstance(item, bool) for item in neutral)


class StrictModel(BaseModel):
    """Base of all bodies: exact types, finite numbers, extra fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(StrictModel):
    """What a stream carries besides the answer."""

    include_usage: bool = False


class GenerationRequest(StrictModel):
    """The fields that both generating routes share."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    max_tokens: NumTokens | None = None
    min_tokens: NumTokens | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, content: Any) -> Any:
        """Refuse fields that would silently do nothing."""
        if isinstance(content, dict):
            for name, neutral in cls.unsupported.items():
                value = content.get(name)
                if value is not None and not _is_one_of(value, neutral):
                    raise _InvalidField(f"{name} is not supported yet; leave it out", name)
        return content

    @model_validator(mode="after")
    def check_stream_options(self) -> GenerationRequest:
        """Refuse options of a stream where there is none."""
        if self.stream_options is not None and not self.stream:
            raise _InvalidField("stream_options needs stream to be true", "stream_options")
        return self

    @property
    def tenant(self) -> str | None:
        """Whom the request is for, as the caller says; OpenAI has renamed the field."""
        return self.safety_identifier or self.user or None

    @property
    def include_usage(self) -> bool:
        """True if the stream is to end with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    unsupported = _UNSUPPORTED | {"suffix": ("",), "best_of": (1,), "prompt_embeds": ()}

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def check_echo(self) -> CompletionRequest:
        """Refuse what the echo can't give, and an answer of no tokens without one."""
        if self.echo and self.logprobs is not None:
            raise _InvalidField(
                "echo together with logprobs is not supported yet: there are no "
                "log-probabilities of the prompt",
                "logprobs",
            )
        if self.max_tokens == 0 and not self.echo:
            raise _InvalidField("max_tokens is 0; it must be at least 1 without echo", "max_tokens")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one, whichever form they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ContentPart(StrictModel):
    """One part of a message. Only text can be served; ``type`` says what else it was."""

    type: Name
    text: Text | None = None


Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Tag("<list>")],
    _one_of(_text_or_list, "a string or a list of parts"),
]


class FunctionCall(StrictModel):
    """A call that the model made earlier: ``arguments`` is JSON in a string."""

    name: Name
    arguments: Text = ""


class ToolCall(StrictModel):
    """A tool call in an assistant's earlier turn."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(StrictModel):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    unsupported = _UNSUPPORTED | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "continue_final_message": (False,),
        "chat_template": (),
        "documents": ([],),
        "best_of": (1,),
        "add_special_tokens": (False,),
        "verbosity": ("medium",),
        "store": (False,),
        "echo": (False,),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], TemplateOption | None],
            Field(max_length=MAX_TEMPLATE_OPTIONS),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatCompletionRequest:
        """Refuse alternatives where no log-probabilities were asked for, and empty answers."""
        if self.top_logprobs and not self.logprobs:
            raise _InvalidField("top_logprobs needs logprobs to be true", "top_logprobs")
        for name in ("max_completion_tokens", "max_tokens"):
            if getattr(self, name) == 0:
                raise _InvalidField(f"{name} is 0; it must be at least 1", name)
        return self


class _InvalidField(InvalidRequestError, ValueError):
    """Raised in validators: pydantic carries a ValueError out, and its message is ours."""

    def __init__(self, message: str, field: str) -> None:
        InvalidRequestError.__init__(self, message, field=field)
