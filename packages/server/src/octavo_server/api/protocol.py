"""The bodies that clients may send. Every field has its bounds here, and only here.

Names are OpenAI's, and vLLM's where it extends them. Validation is strict: ``"1"`` is
no number and ``1`` no boolean. A field of OpenAI's API that does nothing here yet is
refused by name unless it asks for nothing; a field that nobody knows is ignored, since
SDKs send more than the API page lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from octavo_core.errors import InvalidRequestError
from octavo_core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_IDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from octavo_core.structured_outputs import MAX_CHOICES, MAX_STRUCTURED_OUTPUT_CHARS
from octavo_server.tool_parsers.scanner import MAX_TOOL_NAME_CHARS

MAX_TEXT_CHARS = 16 * 1024 * 1024
MAX_NAME_CHARS = 1024
MAX_PROMPTS = 1024
MAX_PROMPT_TOKENS = 4 * 1024 * 1024
MAX_MESSAGES = 16384
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128
MAX_TOOLS = 512
MAX_TEMPLATE_OPTIONS = 64
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_TIMEOUT = 7 * 86400  # seconds

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
# What a header can hold too, and can forge no line of a log.
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
# JSON's keys are strings; 20 characters spell every 64-bit number.
LogitBias = Annotated[
    dict[
        Annotated[str, Field(max_length=20)],
        Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)],
    ],
    Field(max_length=MAX_LOGIT_BIAS_IDS),
]
NumTokens = Annotated[int, Field(ge=0, le=MAX_INT32)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
Integer = Annotated[int, Field(ge=-MAX_INT64, le=MAX_INT64)]
ToolName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Each union says which branch a value is meant for, so that an error tells what is wrong
# there. Tags stand in angle brackets, by which errors tell them from fields.


def form_of_prompt(value: Any) -> str | None:
    """Return the tag of what a prompt, or several, are meant for."""
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


def text_or_list(value: Any) -> str | None:
    """Return the tag of a text, or of a list."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def _form_of_option(value: Any) -> str | None:
    # Not isinstance: to it, a bool is an int.
    return {bool: "<bool>", int: "<int>", float: "<float>", str: "<str>"}.get(type(value))


def one_of(form: Callable[[Any], str | None], wanted: str) -> Discriminator:
    """Return what tells the branches of a union apart, and says `wanted` if none is meant."""
    return Discriminator(
        form, custom_error_type="form", custom_error_message=f"input should be {wanted}"
    )


Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<lists of ids>")],
    one_of(form_of_prompt, "a string, a list of token ids, or a list of either"),
]

Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<list>")],
    one_of(text_or_list, "a string or a list of strings"),
]

TemplateOption = Annotated[
    Annotated[bool, Tag("<bool>")]
    | Annotated[Integer, Tag("<int>")]
    | Annotated[Number, Tag("<float>")]
    | Annotated[str, Field(max_length=MAX_NAME_CHARS), Tag("<str>")],
    one_of(_form_of_option, "a string, a number, a boolean or null"),
]

TemplateOptions = Annotated[
    dict[Annotated[str, Field(max_length=64)], TemplateOption | None],
    Field(max_length=MAX_TEMPLATE_OPTIONS),
]

# Fields of OpenAI's and vLLM's APIs to the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "logits_processors": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "typical_p": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "enable_thinking": (),  # a variable of templates: it belongs into chat_template_kwargs
    "truncation_side": ("left",),
    "return_prompt_text": (False,),
    "repetition_detection": (),
    "watermarking": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "vllm_xargs": ({},),
}


# Fields of completions and chats that the other generating routes don't have.
GENERATION_ONLY: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "logprob_token_ids": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}


def is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is one of those that ask for nothing."""
    # To Python, True is 1 and False is 0.
    is_bool = isinstance(value, bool)
    return any(value == item and is_bool == isinstance(item, bool) for item in neutral)


class InvalidField(InvalidRequestError, ValueError):
    """Raised in validators: pydantic carries a ValueError out, and its message is ours."""

    def __init__(self, message: str, field: str) -> None:
        InvalidRequestError.__init__(self, message, field=field)


class StrictModel(BaseModel):
    """Base of all bodies: exact types, finite numbers, extra fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Body(StrictModel):
    """A body some of whose usual fields are not supported.

    Attributes:
        unsupported: Their names, and the values that ask for nothing.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, content: Any) -> Any:
        """Refuse fields that would silently do nothing."""
        if isinstance(content, dict):
            for name, neutral in cls.unsupported.items():
                value = content.get(name)
                if value is not None and not is_one_of(value, neutral):
                    raise InvalidField(f"{name} is not supported yet; leave it out", name)
        return content


class StreamOptions(StrictModel):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _schema_text(value: Any) -> str:
    if not isinstance(value, dict | bool):
        raise ValueError("a JSON schema is an object, true or false")
    return msgspec.json.encode(value).decode()


def _schema_or_text(value: Any) -> str:
    return value if isinstance(value, str) else _schema_text(value)


ConstraintText = Annotated[str, Field(max_length=MAX_STRUCTURED_OUTPUT_CHARS)]
_IN_A_SCHEMA = WithJsonSchema(
    {
        "type": "object",
        "properties": {},
        "description": f"A JSON schema, of at most {MAX_STRUCTURED_OUTPUT_CHARS} characters.",
    }
)
# What crosses to the engine is text, so it is made text where it is checked.
JsonSchema = Annotated[ConstraintText, BeforeValidator(_schema_text), _IN_A_SCHEMA]
JsonSchemaOrText = Annotated[ConstraintText, BeforeValidator(_schema_or_text), _IN_A_SCHEMA]
Choices = Annotated[list[ConstraintText], Field(min_length=1, max_length=MAX_CHOICES)]


class NamedSchema(StrictModel):
    """The schema that an answer follows; it is enforced with and without ``strict``."""

    # pydantic has a method of this name.
    json_schema: JsonSchema = Field("{}", alias="schema")
    name: Name | None = None
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's way to say what an answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> ResponseFormat:
        """Refuse a type that needs a schema without one."""
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidField(
                "response_format.json_schema is missing", "response_format.json_schema"
            )
        return self


class StructuredOutputs(StrictModel):
    """vLLM's way to say what an answer looks like; one field is given."""

    json_schema: JsonSchemaOrText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: ConstraintText | None = None
    choice: Choices | None = None
    grammar: ConstraintText | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, content: Any) -> Any:
        """Refuse what would silently do nothing."""
        if isinstance(content, dict):
            for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace"):
                if content.get(name):
                    raise InvalidField(
                        f"structured_outputs.{name} is not supported yet; leave it out",
                        "structured_outputs",
                    )
        return content


class SamplingBody(Body):
    """The fields that all generating routes share, whoever's API they are of."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    min_tokens: NumTokens | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    request_id: RequestId | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None
    include_timing: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaOrText | None = None
    guided_json_object: bool | None = None
    guided_regex: ConstraintText | None = None
    guided_choice: Choices | None = None
    guided_grammar: ConstraintText | None = None

    @model_validator(mode="after")
    def check_truncation(self) -> Self:
        """Refuse to leave nothing of a prompt."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidField(
                "truncate_prompt_tokens is 0; it must be at least 1, or -1 for what the context "
                "leaves",
                "truncate_prompt_tokens",
            )
        return self


class GenerationRequest(SamplingBody):
    """The fields that completions and chats share."""

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    stop: Stop | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logprob_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)] | None
    ) = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> GenerationRequest:
        """Refuse options of a stream where there is none."""
        if self.stream_options is not None and not self.stream:
            raise InvalidField("stream_options needs stream to be true", "stream_options")
        if self.has_running_usage and not self.include_usage:
            raise InvalidField(
                "continuous_usage_stats needs include_usage to be true",
                "stream_options.continuous_usage_stats",
            )
        return self

    @model_validator(mode="after")
    def check_best_of(self) -> GenerationRequest:
        """Refuse to compute answers that are not given."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidField(
                f"best_of is {self.best_of}; it must equal n, which is {self.n or 1}: all answers "
                f"are given",
                "best_of",
            )
        return self

    @property
    def tenant(self) -> str | None:
        """Whom the request is for, as the caller says; OpenAI has renamed the field."""
        return self.safety_identifier or self.user or None

    @property
    def include_usage(self) -> bool:
        """True if the stream is to end with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """True if each chunk of the stream is to tell the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    unsupported = UNSUPPORTED | {
        "suffix": ("",),
        "prompt_embeds": (),
        "reasoning": (),
        "reasoning_effort": ("none",),
    }

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def check_max_tokens(self) -> CompletionRequest:
        """Refuse an answer of no tokens, unless it has the prompt or what is said about it."""
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidField(
                "max_tokens is 0; it must be at least 1 without echo or prompt_logprobs",
                "max_tokens",
            )
        return self

    @property
    def echoed_logprobs(self) -> int | None:
        """How many alternatives the ``logprobs`` of an echo tell for each token of the prompt."""
        return self.logprobs if self.echo else None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one, whichever form they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
