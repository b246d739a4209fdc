"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen and others."""

from __future__ import annotations

from octavo_server.tool_parsers.json_scanner import JsonScanner
from octavo_server.tool_parsers.scanner import Call, Markers, Steps

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_OPEN = Markers(OPEN)


class HermesParser(JsonScanner):
    """Calls in tags, each a JSON object, between any text."""

    name = "hermes"

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        while marker := (yield from self.copy_until(_OPEN)):
            yield from self.attempt(self._call(), marker)

    def _call(self) -> Steps[None]:
        call = Call(self)
        yield from self.call_object(call)
        yield from self.expect_or_end(CLOSE)
        call.end()
