"""``{"name": …, "parameters": {…}}`` as the whole answer: Llama 3.1 and later."""

from __future__ import annotations

from octavo_server.tool_parsers.json_scanner import JsonScanner
from octavo_server.tool_parsers.scanner import Call, Markers, Steps

TAG = "<|python_tag|>"

_TAG = Markers(TAG)


class Llama3JsonParser(JsonScanner):
    """Calls are bare JSON objects, so the answer must begin with one that names a known tool.

    Several are separated by semicolons or white space. Text may come first if the tag
    `TAG` then announces the calls.
    """

    name = "llama3_json"
    needs_special_tokens = True
    needs_known_name = True

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        if (yield from self.copy_space(self.text)) == "{":
            yield from self._calls("")
        while marker := (yield from self.copy_until(_TAG)):
            yield from self._calls(marker)

    def _calls(self, opening: str) -> Steps[None]:
        while (yield from self.attempt(self._call(), opening)):
            opening = ""
            yield from self.skip_space()
            if not (yield from self.accept(";")):
                yield from self.accept(",")
            if (yield from self.skip_space()) != "{":
                return

    def _call(self) -> Steps[None]:
        call = Call(self)
        yield from self.call_object(call)
        call.end()
