"""From one choice's text to its reasoning, text and calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo_core.config import ServerConfig
from octavo_server.answer_events import (
    AnswerEvent,
    ArgumentsDelta,
    CallStart,
    ReasoningDelta,
    TextDelta,
    merge,
)
from octavo_server.detokenizer import TextOffsets
from octavo_server.reasoning_parsers import (
    REASONING_PARSERS,
    ThinkParser,
    detect_reasoning_parser,
    reasoning_parser,
)
from octavo_server.reasoning_parsers.registry import HARMONY
from octavo_server.tokenizer import Tokenizer
from octavo_server.tool_parsers import Scanner, detect_tool_parser, tool_parser
from octavo_server.tool_parsers.harmony import HarmonyParser
from octavo_server.tool_parsers.hermes import HermesParser
from octavo_server.tool_parsers.registry import AUTO


class AnswerParser:
    """The parsers that one choice's text passes, each of its own kind or none.

    Args:
        reasoning: Splits off what comes before the answer.
        tools: Finds calls in the answer.
        single_call: Drop all calls but the first.
        shows_reasoning: False drops the reasoning.
    """

    def __init__(
        self,
        reasoning: Scanner | None = None,
        tools: Scanner | None = None,
        *,
        single_call: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._single_call = single_call
        self._shows_reasoning = shows_reasoning

    def push(self, text: str) -> list[AnswerEvent]:
        """Take more text; return what it tells."""
        if self._reasoning is None:
            return self._answer([TextDelta(text)] if text else [])
        return self._answer(self._reasoning.push(text))

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back, now that the text is at its end."""
        events = [] if self._reasoning is None else self._answer(self._reasoning.finish())
        last = [] if self._tools is None else self._tools.finish()
        return merge([*events, *self._shown(last)])

    @property
    def can_reason(self) -> bool:
        """True if reasoning is told from the answer."""
        return self._reasoning is not None or isinstance(self._tools, HarmonyParser)

    def num_reasoning_tokens(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> int:
        """Return how many of the choice's tokens were reasoning.

        Args:
            token_ids: All of the choice's tokens.
            skip_special_tokens: Whether the text went without control tokens.
        """
        source = self._reasoning or self._tools
        if source is None or not source.reasoning_spans:
            return 0
        offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens)
        starts = [offsets.push(token_id) for token_id in token_ids]
        return sum(
            sum(begin <= start and (end is None or start < end) for start in starts)
            for begin, end in source.reasoning_spans
        )

    def _answer(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if self._tools is None:
            return self._shown(events)
        found: list[AnswerEvent] = []
        for event in events:
            found += self._tools.push(event.text) if isinstance(event, TextDelta) else [event]
        return merge(self._shown(found))

    def _shown(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if self._shows_reasoning and not self._single_call:
            return events
        return [event for event in events if self._is_shown(event)]

    def _is_shown(self, event: AnswerEvent) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._shows_reasoning
        if isinstance(event, CallStart | ArgumentsDelta):
            return not (self._single_call and event.index > 0)
        return True


@dataclass(frozen=True)
class AnswerFormat:
    """How one model writes calls and reasoning.

    Attributes:
        tool_parser: None if calls are not looked for.
        reasoning: Name of the reasoning parser, or None.
        takes_tools: True if the chat template writes out tools.
        takes_effort: True if the chat template knows ``reasoning_effort``.
        takes_thinking: True if the chat template calls reasoning ``thinking``.
    """

    tool_parser: type[Scanner] | None = HermesParser
    reasoning: str | None = None
    takes_tools: bool = False
    takes_effort: bool = False
    takes_thinking: bool = False

    @classmethod
    def of(cls, chat_template: str | None, config: ServerConfig | None = None) -> AnswerFormat:
        """Find the format in the chat template, where the configuration does not name it.

        A model whose template says nothing of tools is told how to call them by a system
        message, and that asks for the format of Hermes.

        Raises:
            ConfigError: The configuration names a parser that there is not.
        """
        template = chat_template or ""
        config = config or ServerConfig()
        tools = config.tool_call_parser
        reasoning = config.reasoning_parser
        return cls(
            tool_parser=(
                detect_tool_parser(template) or HermesParser
                if tools == AUTO
                else tool_parser(tools)
            ),
            reasoning=(
                detect_reasoning_parser(template)
                if reasoning == AUTO
                else reasoning_parser(reasoning)
            ),
            takes_tools=re.search(r"\btools\b", template) is not None,
            takes_effort="reasoning_effort" in template,
            takes_thinking="message.thinking" in template,
        )

    def describe(self) -> str:
        """Name both parsers, for the log."""
        tools = self.tool_parser.name if self.tool_parser is not None else "none"
        return f"{tools} and {self.reasoning or 'none'}"

    @property
    def think_parser(self) -> type[ThinkParser] | None:
        """The parser of reasoning in tags, or None if there is none of that kind."""
        return None if self.reasoning in (None, HARMONY) else REASONING_PARSERS[self.reasoning]

    def is_open(self, prompt_end: str) -> bool:
        """True if a prompt with this end leaves the model in the middle of its reasoning."""
        parser = self.think_parser
        return parser is not None and prompt_end.rstrip().endswith(parser.opening)
