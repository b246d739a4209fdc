"""Which model thinks how: by a parser's name, or by what its chat template looks for."""

from __future__ import annotations

from octavo_core.errors import ConfigError
from octavo_server.reasoning_parsers.think import (
    KimiThinkParser,
    MistralThinkParser,
    ReasoningTagParser,
    SeedThinkParser,
    ThinkingTagParser,
    ThinkParser,
    ThoughtTagParser,
)
from octavo_server.tool_parsers.harmony import CHANNEL

# gpt-oss writes reasoning and calls in one format, which one parser reads.
HARMONY = "harmony"

REASONING_PARSERS: dict[str, type[ThinkParser]] = {
    "think": ThinkParser,
    "thinking": ThinkingTagParser,
    "thought": ThoughtTagParser,
    "reasoning": ReasoningTagParser,
    "seed_oss": SeedThinkParser,
    "mistral": MistralThinkParser,
    "kimi": KimiThinkParser,
}
# Names that users of vLLM know.
_ALIASES = {
    **dict.fromkeys(
        ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "hunyuan_a13b", "smollm3"), "think"
    ),
    "magistral": "mistral",
    "openai_gptoss": HARMONY,
    "gpt_oss": HARMONY,
}
NO_PARSER = "none"
AUTO = "auto"


def reasoning_parser(name: str) -> str | None:
    """Return the name in `REASONING_PARSERS`, or `HARMONY`, that `name` stands for.

    Returns:
        None for ``none``.

    Raises:
        ConfigError: There is no such parser.
    """
    if name == NO_PARSER:
        return None
    found = _ALIASES.get(name, name)
    if found not in REASONING_PARSERS and found != HARMONY:
        known = ", ".join([AUTO, NO_PARSER, *REASONING_PARSERS, HARMONY])
        raise ConfigError(
            f"reasoning_parser is {name!r}; --reasoning-parser must be one of {known}.",
            field="reasoning_parser",
        )
    return found


def detect_reasoning_parser(chat_template: str) -> str | None:
    """Return the name of the parser for a model with this template, or None.

    A template of a model that thinks knows the closing tag, since it leaves out what was
    thought in earlier turns.
    """
    if CHANNEL in chat_template:
        return HARMONY
    for name, parser in REASONING_PARSERS.items():
        if parser.closing in chat_template:
            return name
    return None


def check_reasoning_parser(name: str) -> None:
    """Refuse a name that stands for no parser, and isn't `AUTO` either.

    Raises:
        ConfigError: There is no such parser.
    """
    if name != AUTO:
        reasoning_parser(name)
