"""Chat templates: from messages to the one text that the model was trained on.

The templates come with models and are written for the jinja2 environment of
transformers' ``apply_chat_template``, which this one equals. They run in jinja2's
immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo_core.errors import InvalidRequestError, ModelError


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
        except jinja2.TemplateError as error:
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
        variables = {**self._tokens, **options, "messages": given, "tools": tools}
        try:
            return self._template.render(
                **variables,
                documents=options.get("documents"),
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise _refused(str(error)) from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise _refused(f"{type(error).__name__}: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise _refused(type(error).__name__) from error


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"messages don't fit the model's chat template: {reason.rstrip('.')}.", field="messages"
    )


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
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
