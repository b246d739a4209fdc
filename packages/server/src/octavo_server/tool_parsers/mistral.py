"""``[TOOL_CALLS]`` and then ``[{"name": …, "arguments": {…}}]`` or ``name[ARGS]{…}``: Mistral."""

from __future__ import annotations

import secrets
import string

from octavo_server.tool_parsers.json_scanner import JsonScanner
from octavo_server.tool_parsers.scanner import (
    MAX_TOOL_NAME_CHARS,
    Call,
    MalformedCallError,
    Markers,
    Steps,
)

MARKER = "[TOOL_CALLS]"
ID_CHARS = 9

_MARKER = Markers(MARKER)
_AFTER_NAME = Markers("[ARGS]", "[CALL_ID]", "{")
_AFTER_ID = Markers("[ARGS]", "{")
_LETTERS = string.ascii_letters + string.digits


class MistralParser(JsonScanner):
    """A list of calls behind one marker, as older models write it, or a marker for each call."""

    name = "mistral"
    needs_special_tokens = True

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        while marker := (yield from self.copy_until(_MARKER)):
            if (yield from self.skip_space()) == "[":
                yield from self._list(marker + self.take(1))
            else:
                yield from self.attempt(self._named(), marker)

    def new_id(self) -> str:
        """Return an id of nine letters and digits, without which templates refuse it later."""
        return "".join(secrets.choice(_LETTERS) for _ in range(ID_CHARS))

    def _list(self, opening: str) -> Steps[None]:
        while (yield from self.attempt(self._call(), opening)):
            opening = ""
            following = yield from self.skip_space()
            if following not in (",", "]") or not following:
                return
            self.take(1)
            if following == "]":
                return

    def _call(self) -> Steps[None]:
        call = Call(self)
        yield from self.call_object(call)
        call.end()

    def _named(self) -> Steps[None]:
        name, marker = yield from self.take_until(_AFTER_NAME, MAX_TOOL_NAME_CHARS)
        if marker == "[CALL_ID]":
            _, marker = yield from self.take_until(_AFTER_ID, MAX_TOOL_NAME_CHARS)
        self.check_name(name.strip())
        call = Call(self, name.strip())
        if marker == "{":
            self.put_back(marker)
        yield from self.arguments(call)
        call.end()

    def check_name(self, name: str) -> None:
        """Refuse what can't be the name of a tool."""
        super().check_name(name)
        if any(letter.isspace() for letter in name):
            raise MalformedCallError
