"""Which model calls tools how: by a parser's name, or by what its chat template writes."""

from __future__ import annotations

from octavo_core.errors import ConfigError
from octavo_server.tool_parsers import deepseek, harmony, hermes, llama3_json, mistral, qwen3_coder
from octavo_server.tool_parsers.deepseek import DeepSeekParser
from octavo_server.tool_parsers.harmony import HarmonyParser
from octavo_server.tool_parsers.hermes import HermesParser
from octavo_server.tool_parsers.llama3_json import Llama3JsonParser
from octavo_server.tool_parsers.mistral import MistralParser
from octavo_server.tool_parsers.pythonic import PythonicParser
from octavo_server.tool_parsers.qwen3_coder import Qwen3CoderParser
from octavo_server.tool_parsers.scanner import Scanner

TOOL_PARSERS: dict[str, type[Scanner]] = {
    parser.name: parser
    for parser in (
        HermesParser,
        Qwen3CoderParser,
        Llama3JsonParser,
        MistralParser,
        PythonicParser,
        DeepSeekParser,
        HarmonyParser,
    )
}
# Names that users of vLLM know.
_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "gpt_oss": "harmony",
    "openai": "harmony",
}
NO_PARSER = "none"
AUTO = "auto"

# What a template holds if its model writes that format; the first that is found counts.
_SIGNS = (
    (harmony.CHANNEL, HarmonyParser),
    (deepseek.CALL_BEGIN, DeepSeekParser),
    (mistral.MARKER, MistralParser),
    (qwen3_coder.FUNCTION, Qwen3CoderParser),
    (hermes.OPEN, HermesParser),
    ("<|tool_call_start|>", PythonicParser),
    ("<|python_start|>", PythonicParser),
    ("[func_name1(", PythonicParser),
    (llama3_json.TAG, Llama3JsonParser),
    ('{"name": function name, "parameters":', Llama3JsonParser),
)


def tool_parser(name: str) -> type[Scanner] | None:
    """Return the parser that `name` stands for.

    Returns:
        None for ``none``.

    Raises:
        ConfigError: There is no such parser.
    """
    if name == NO_PARSER:
        return None
    found = TOOL_PARSERS.get(_ALIASES.get(name, name))
    if found is None:
        known = ", ".join([AUTO, NO_PARSER, *TOOL_PARSERS])
        raise ConfigError(
            f"tool_call_parser is {name!r}; --tool-call-parser must be one of {known}.",
            field="tool_call_parser",
        )
    return found


def detect_tool_parser(chat_template: str) -> type[Scanner] | None:
    """Return the parser for a model with this template, or None if it tells no format."""
    return next((parser for sign, parser in _SIGNS if sign in chat_template), None)


def check_tool_parser(name: str) -> None:
    """Refuse a name that stands for no parser, and isn't `AUTO` either.

    Raises:
        ConfigError: There is no such parser.
    """
    if name != AUTO:
        tool_parser(name)
