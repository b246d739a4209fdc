"""Chat templates: from messages to the one text that the model was trained on.

The templates come with models and are written for the jinja2 environment of
transformers' ``apply_chat_template``, which this one equals. They run in jinja2's
immutable sandbox, for a bounded time and with a bounded result: some look at all messages
for each of them.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo_core.errors import InvalidRequestError, ModelError

# CPU seconds, so that a busy machine refuses nobody. 16,384 messages take most templates 0.5 s.
MAX_RENDER_SECONDS = 5.0
MAX_RENDERED_CHARS = 64 * 1024 * 1024
# Looks at a thread's clock take 0.3 µs, and what is looked up about as much.
_LOOKUPS_PER_CHECK = 256


class ChatTemplate:
    """One model's template, compiled.

    Args:
        source: jinja2 text.
        bos_token: Text of the BOS token; templates write it as ``{{ bos_token }}``.
        eos_token: Text of the EOS token.

    Raises:
        ModelError: `source` is no valid template.
    """

    def __init__(
        self, source: str, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"The model's chat template can't be compiled: {error}.", field="chat_template"
            ) from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """Render a conversation.

        Args:
            messages: In the shape of OpenAI's API. Entries that are None are left out,
                since templates would print them.
            add_generation_prompt: Open the assistant's turn at the end.
            tools: Tool schemas in the shape of OpenAI's API.
            options: Further variables of the template, such as ``enable_thinking``.

        Raises:
            InvalidRequestError: The template refuses the messages, or can't work with them.
        """
        given = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        variables = {
            **self._tokens,
            "documents": None,
            **options,
            "messages": given,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _render(self._template, variables)
        except jinja2.TemplateError as error:
            raise _refused(str(error)) from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise _refused(f"{type(error).__name__}: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise _refused(type(error).__name__) from error


# Tokens that some models don't flag as control tokens, although they shape a turn.
_TURN_MARKS = re.compile(r"</?(think|tool_call|tool_response)>")
# Unicode's noncharacters, which no text has a reason to hold.
_MARKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class ControlTokenGuard:
    """Tells the control tokens that a template writes from those that users spell out.

    Text in messages must not become control tokens: it could end its turn and forge
    another. A marker is put inside each control token's spelling in the messages
    before they are rendered; what is whole afterwards is the template's.

    Args:
        special_tokens: Spellings of the control tokens.
        added_tokens: Spellings of all tokens that are found before a text is cut.
    """

    def __init__(self, special_tokens: Collection[str], added_tokens: Collection[str]) -> None:
        self._special = _any_of(special_tokens)
        marks = {token for token in added_tokens if _TURN_MARKS.fullmatch(token)}
        self._guarded = _any_of({*special_tokens, *marks})
        self._added = _any_of(added_tokens)

    def mark(self, values: Sequence[Any]) -> tuple[list[Any], str | None]:
        """Mark the spellings in messages, tools and the like.

        Returns:
            The values, and the marker, or None if there was nothing to mark.
        """
        if not self._found(values):
            return list(values), None
        text = json.dumps(values, ensure_ascii=False, default=str)
        marker = next((marker for marker in _MARKERS if marker not in text), None)
        if marker is None:
            raise _refused("they hold every noncharacter of Unicode")
        return [_mark(value, self._guarded, self._special, marker) for value in values], marker

    def split(self, text: str, marker: str) -> list[tuple[str, bool]]:
        """Cut a rendered text into the template's control tokens and what is between them.

        Returns:
            Pairs of a text without markers, and whether it is a control token.
        """
        assert self._added is not None
        pieces = re.split(f"({self._added.pattern})", text)
        flagged = [(piece.replace(marker, ""), bool(i % 2)) for i, piece in enumerate(pieces)]
        return [(piece, is_token) for piece, is_token in flagged if piece]

    def _found(self, node: Any) -> bool:
        if isinstance(node, str):
            return self._guarded is not None and self._guarded.search(node) is not None
        if isinstance(node, dict):
            return any(self._found(item) for item in node.values())
        return isinstance(node, list | tuple) and any(self._found(item) for item in node)


_Pattern = re.Pattern[str] | None


def _mark(node: Any, guarded: _Pattern, special: _Pattern, marker: str) -> Any:
    if isinstance(node, str):
        return guarded.sub(lambda m: m[0][0] + marker + m[0][1:], node) if guarded else node
    if isinstance(node, dict):
        # Templates look for </think> and the like in the model's own turns.
        inner = special if node.get("role") == "assistant" else guarded
        return {key: _mark(value, inner, special, marker) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_mark(item, guarded, special, marker) for item in node]
    return node


def _any_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    # The longest first, as the tokenizer takes them. One character can't be marked inside.
    ordered = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class _Budget(threading.local):
    """What is left of the time of the template that this thread renders."""

    ends = float("inf")  # CPU seconds of the thread
    num_lookups = 0

    def spend(self) -> None:
        """Count one thing that a template looks up or calls; every loop has some.

        Raises:
            TemplateError: The time is over.
        """
        self.num_lookups += 1
        if self.num_lookups % _LOOKUPS_PER_CHECK == 0:
            self.check()

    def check(self) -> None:
        """Look at the clock."""
        if time.thread_time() > self.ends:
            raise jinja2.TemplateError(f"rendering them takes more than {MAX_RENDER_SECONDS:g} s")


_budget = _Budget()


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The immutable sandbox, with a clock."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        _budget.spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _budget.spend()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.check()
        return super().call(context, obj, *args, **kwargs)


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces, num_chars = [], 0
    _budget.ends = time.thread_time() + MAX_RENDER_SECONDS
    try:
        for piece in template.generate(variables):
            _budget.spend()
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise jinja2.TemplateError(f"they make more than {MAX_RENDERED_CHARS} characters")
    finally:
        _budget.ends = float("inf")
    return "".join(pieces)


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"messages don't fit the model's chat template: {reason.rstrip('.')}.", field="messages"
    )


def _environment() -> jinja2.Environment:
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}``, which marks the assistant's text for training.

    Rendered as if the tags were not there.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes < and > for HTML, which models have not been trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
