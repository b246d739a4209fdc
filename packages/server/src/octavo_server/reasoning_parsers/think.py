"""``<think>…</think>`` in front of the answer, and other spellings of the same."""

from __future__ import annotations

from octavo_server.answer_events import TextDelta
from octavo_server.tool_parsers.scanner import Markers, Scanner, Steps


class ThinkParser(Scanner):
    """Splits reasoning in tags from the answer behind it.

    Only a block at the very beginning is reasoning: later ones are text about tags.

    Args:
        is_open: The prompt has ended in the opening tag.
    """

    opening = "<think>"
    closing = "</think>"

    def __init__(self, *, is_open: bool = False) -> None:
        super().__init__()
        self._is_open = is_open

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        space: list[str] = []
        yield from self.copy_space(space.append)
        if (yield from self.accept(self.opening)) or self._is_open:
            yield from self.copy_reasoning(Markers(self.closing))
            yield from self.skip_space()
        else:
            self._pass("".join(space))
        while (yield from self.peek()):
            self._pass(self.take(len(self._buffer) - self._position))

    def _pass(self, text: str) -> None:
        # White space in the answer is the answer's own, or the tool parser's to judge.
        if text:
            self.emit(TextDelta(text))


class ThinkingTagParser(ThinkParser):
    """``<thinking>``."""

    opening = "<thinking>"
    closing = "</thinking>"


class ThoughtTagParser(ThinkParser):
    """``<thought>``."""

    opening = "<thought>"
    closing = "</thought>"


class ReasoningTagParser(ThinkParser):
    """``<reasoning>``."""

    opening = "<reasoning>"
    closing = "</reasoning>"


class SeedThinkParser(ThinkParser):
    """``<seed:think>``, of Seed-OSS."""

    opening = "<seed:think>"
    closing = "</seed:think>"


class MistralThinkParser(ThinkParser):
    """``[THINK]``, of Magistral. Its tags are control tokens."""

    needs_special_tokens = True
    opening = "[THINK]"
    closing = "[/THINK]"


class KimiThinkParser(ThinkParser):
    """``◁think▷``, of Kimi."""

    opening = "◁think▷"
    closing = "◁/think▷"
