"""``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``: DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

from octavo_server.tool_parsers.json_scanner import JsonScanner
from octavo_server.tool_parsers.scanner import MAX_TOOL_NAME_CHARS, Call, Markers, Steps

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_MARKERS = Markers(CALLS_BEGIN, CALLS_END, CALL_BEGIN)
_SEPARATOR = Markers(SEPARATOR)
_LINE_END = Markers("\n")


class DeepSeekParser(JsonScanner):
    """V3 and R1 write ``function``, the separator, the name, and the arguments in a fence of
    Markdown; V3.1 the name, the separator and the bare arguments.
    """

    name = "deepseek"
    needs_special_tokens = True

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        while marker := (yield from self.copy_until(_MARKERS)):
            if marker == CALL_BEGIN:
                yield from self.attempt(self._call(), marker)
            else:
                self.mark()

    def _call(self) -> Steps[None]:
        name, _ = yield from self.take_until(_SEPARATOR, MAX_TOOL_NAME_CHARS)
        if is_fenced := name.strip() == "function":
            name, _ = yield from self.take_until(_LINE_END, MAX_TOOL_NAME_CHARS)
        self.check_name(name.strip())
        call = Call(self, name.strip())
        if is_fenced:
            yield from self.skip_space()
            yield from self.expect("```json")
        yield from self.arguments(call)
        if is_fenced:
            yield from self.expect_or_end("```")
        yield from self.expect_or_end(CALL_END)
        call.end()
