"""From a conversation to the engine's requests: what all three chat APIs have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from octavo_core.errors import ContextLengthError, InvalidRequestError
from octavo_core.sampling_params import SamplingParams
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_core.wire import EngineCoreRequest
from octavo_server.answer_parser import AnswerParser
from octavo_server.api.context import LoadedModel
from octavo_server.api.tool_turns import (
    has_tool_turns,
    with_one_thought,
    with_short_ids,
    with_text_arguments,
)
from octavo_server.api.tool_use import NO_TOOLS, ToolUse
from octavo_server.tool_parsers.forced import (
    ForcedArgumentsParser,
    ForcedCallsParser,
    forced_arguments,
    forced_calls,
)
from octavo_server.tool_parsers.harmony import HarmonyParser
from octavo_server.tool_parsers.mistral import MistralParser
from octavo_server.tool_parsers.scanner import Scanner
from octavo_server.tool_prompt import with_tool_prompt

Result = TypeVar("Result")

# Enough of a prompt to see whether it ends in the opening tag of a block of reasoning.
_PROMPT_END_TOKENS = 16

# gpt-oss knows three efforts.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}

# Names that are ours, and that a request's template options must not override.
_RESERVED_OPTIONS = frozenset(
    {
        "self",
        "request_id",
        "messages",
        "params",
        "arrival_time",
        "priority",
        "cache_salt",
        "tenant",
        "add_generation_prompt",
        "tools",
        "chat_template",
        "bos_token",
        "eos_token",
        "truncate_prompt_tokens",
    }
)


@dataclass(frozen=True)
class Conversation:
    """A conversation that waits for its next message.

    Attributes:
        messages: For the chat template; content is text.
        template_options: Further variables of the chat template, as the request gave them.
        reasoning_effort: How much the model should think, in OpenAI's words, if the request
            says so.
        shows_reasoning: False drops the reasoning from the answer.
        prefill: The beginning of the answer, which the model goes on from.
        request_options: ``priority``, ``cache_salt`` and ``tenant`` for the engine.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tool_use: ToolUse = NO_TOOLS
    template_options: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    shows_reasoning: bool = True
    add_generation_prompt: bool = True
    prefill: str | None = None
    request_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedConversation:
    """A conversation as the engine gets it, and how its answer is to be read.

    Attributes:
        requests: One for each choice.
        is_reasoning: The prompt has opened a block of reasoning.
    """

    model: LoadedModel
    conversation: Conversation
    requests: list[EngineCoreRequest]
    is_reasoning: bool

    def new_parser(self) -> AnswerParser:
        """Return a parser for one choice."""
        conversation = self.conversation
        answer_format = self.model.answer_format
        tool_use = conversation.tool_use
        think = answer_format.think_parser
        has_constraint = self.requests[0].sampling_params.structured_outputs is not None
        if has_constraint and not self.is_reasoning:
            # The constraint begins with the first token, and allows no reasoning.
            think = None
        return AnswerParser(
            None if think is None else think(is_open=self.is_reasoning),
            _tool_parser(self.model, tool_use),
            single_call=not tool_use.is_parallel,
            shows_reasoning=conversation.shows_reasoning,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.requests[0].prompt_token_ids)

    @property
    def skip_special_tokens(self) -> bool:
        """Whether the answer's text goes without control tokens."""
        return self.requests[0].sampling_params.skip_special_tokens

    def constraint_field(self, own: str) -> str:
        """Return the field that the constraint comes from.

        Args:
            own: Where the API has a constraint on the text.
        """
        return "tools" if self.conversation.tool_use.is_forced else own

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """Return the reason in OpenAI's words, given what was found in the answer.

        A named tool leaves ``stop``, as OpenAI has it: the caller knows that there is a call.
        """
        if reason == "stop" and num_calls and self.conversation.tool_use.mode != "named":
            return "tool_calls"
        return reason


def prepare(
    model: LoadedModel, request_id: str, conversation: Conversation
) -> PreparedConversation:
    """Render the chat template and tokenize; takes a while for long conversations.

    Raises:
        InvalidRequestError: The messages don't fit the template or the model.
    """
    tool_use = conversation.tool_use
    params = conversation.params
    if _needs_special_tokens(model, tool_use):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    requests = _process(model, request_id, conversation, params)
    if conversation.prefill:
        requests = _with_prefill(model, request_id, conversation, requests[0], params)
    end = requests[0].prompt_token_ids[-_PROMPT_END_TOKENS:]
    is_reasoning = model.answer_format.is_open(
        model.tokenizer.decode(end, skip_special_tokens=False)
    )
    think = model.answer_format.think_parser
    # What the prompt has begun comes to its end first, free of any constraint.
    after = think.closing if think is not None and is_reasoning else None
    constraint = params.structured_outputs
    if tool_use.is_forced:
        constraint = _forced(tool_use, after)
    elif constraint is not None:
        constraint = msgspec.structs.replace(constraint, after=after)
    if constraint is not None:
        requests = [_with_constraint(request, constraint) for request in requests]
    return PreparedConversation(model, conversation, requests, is_reasoning)


def prompt_token_ids(model: LoadedModel, conversation: Conversation) -> list[int]:
    """Return the tokens of the prompt, be they more than the model takes.

    Raises:
        InvalidRequestError: The messages don't fit the template.
    """
    token_ids = _with_turns(model, conversation, model.input_processor.encode_chat)
    return [*token_ids, *model.input_processor.encode_beginning(conversation.prefill or "")]


def _process(
    model: LoadedModel, request_id: str, conversation: Conversation, params: SamplingParams
) -> list[EngineCoreRequest]:
    def process(turns: list[dict[str, Any]], **options: Any) -> list[EngineCoreRequest]:
        return model.input_processor.process_chat(
            request_id, turns, params, **conversation.request_options, **options
        )

    return _with_turns(model, conversation, process)


def _with_turns(
    model: LoadedModel, conversation: Conversation, use: Callable[..., Result]
) -> Result:
    """Return what `use` makes of the messages, and of the template's options."""
    messages, tools = _turns(model, conversation)
    options = {
        "add_generation_prompt": conversation.add_generation_prompt,
        "tools": tools,
        **_template_options(model, conversation),
    }
    try:
        return use(messages, **options)
    except ContextLengthError:
        raise
    except InvalidRequestError as error:
        # Most templates write arguments out as JSON themselves; some want the text.
        with_text = with_text_arguments(messages)
        if with_text is None:
            raise
        try:
            return use(with_text, **options)
        except InvalidRequestError:
            raise error from None


def _turns(
    model: LoadedModel, conversation: Conversation
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the messages and the tools as the model's template takes them."""
    messages = conversation.messages
    tools = conversation.tool_use.for_template()
    if not model.answer_format.takes_tools and (tools or has_tool_turns(messages)):
        return with_tool_prompt(messages, tools or []), None
    if model.answer_format.tool_parser is MistralParser:
        messages = with_short_ids(messages)
    if model.answer_format.takes_thinking:
        messages = with_one_thought(messages)
    return messages, tools


def _with_prefill(
    model: LoadedModel,
    request_id: str,
    conversation: Conversation,
    request: EngineCoreRequest,
    params: SamplingParams,
) -> list[EngineCoreRequest]:
    """Add the beginning of the answer to the prompt, and check that again."""
    assert conversation.prefill is not None
    prefill = model.input_processor.encode_beginning(conversation.prefill)
    return model.input_processor.process(
        request_id,
        [*request.prompt_token_ids, *prefill],
        params,
        field="messages",
        **conversation.request_options,
    )


def _template_options(model: LoadedModel, conversation: Conversation) -> dict[str, Any]:
    options: dict[str, Any] = {}
    effort = conversation.reasoning_effort
    if effort is not None:
        # By which of the two names depends on the template.
        options["enable_thinking"] = options["thinking"] = effort != "none"
        if model.answer_format.takes_effort:
            is_harmony = model.answer_format.reasoning == "harmony"
            options["reasoning_effort"] = (
                _HARMONY_EFFORTS.get(effort, effort) if is_harmony else effort
            )
    given = conversation.template_options
    reserved = sorted(_RESERVED_OPTIONS & given.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs has {reserved[0]!r}, which is not the request's to set; leave "
            f"it out.",
            field="chat_template_kwargs",
        )
    return options | dict(given)


def _tool_parser(model: LoadedModel, tool_use: ToolUse) -> Scanner | None:
    if tool_use.mode == "named":
        return ForcedArgumentsParser(tool_use.names, commit_chars=0)
    if tool_use.mode == "required":
        return ForcedCallsParser(tool_use.names, commit_chars=0)
    parser = model.answer_format.tool_parser
    if tool_use.mode == "auto" and parser is not None:
        return parser(tool_use.parameters())
    return HarmonyParser() if model.answer_format.reasoning == "harmony" else None


def _needs_special_tokens(model: LoadedModel, tool_use: ToolUse) -> bool:
    parsers = (_tool_parser(model, tool_use), model.answer_format.think_parser)
    return any(parser is not None and parser.needs_special_tokens for parser in parsers)


def _forced(tool_use: ToolUse, after: str | None) -> StructuredOutputsParams:
    if tool_use.mode == "named":
        return forced_arguments(tool_use.schemas()[0], after)
    return forced_calls(tool_use.schemas(), is_parallel=tool_use.is_parallel, after=after)


def _with_constraint(
    request: EngineCoreRequest, constraint: StructuredOutputsParams
) -> EngineCoreRequest:
    params = msgspec.structs.replace(request.sampling_params, structured_outputs=constraint)
    return msgspec.structs.replace(request, sampling_params=params)
