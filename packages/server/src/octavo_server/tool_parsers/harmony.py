"""``<|channel|>analysis<|message|>…<|end|>``: the messages of gpt-oss.

An answer is several messages, each with a channel and maybe a recipient: ``analysis`` is
reasoning, ``to=functions.NAME`` is a call, all else is for the user.
"""

from __future__ import annotations

import re

from octavo_server.tool_parsers.json_scanner import JsonScanner
from octavo_server.tool_parsers.scanner import (
    Call,
    MalformedCallError,
    Markers,
    Steps,
)

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_MAX_HEADER_CHARS = 512
_MESSAGE = Markers(MESSAGE)
_CONTROL = Markers(START, CHANNEL, MESSAGE, *ENDS)
_BODY_END = Markers(START, *ENDS)
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.:/-]+)")


class HarmonyParser(JsonScanner):
    """Reasoning, text and calls of gpt-oss.

    Without tools, calls are text.
    """

    name = "harmony"
    needs_special_tokens = True

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        # The prompt has ended in "<|start|>assistant": a recipient may come before the channel.
        if (yield from self.accept(" to=")):
            yield from self._message(" to=")
        while marker := (yield from self.copy_until(_CONTROL)):
            if marker in ENDS:
                self.mark()
            elif marker == MESSAGE:
                yield from self._body("")
            else:
                yield from self._message(marker)

    def _message(self, opening: str) -> Steps[None]:
        """Read a header up to its end, and the body behind it."""
        header: list[str] = []
        if (yield from self.attempt(self._header(header), opening)):
            yield from self._body(opening + header[0])

    def _header(self, header: list[str]) -> Steps[None]:
        text, _ = yield from self.take_until(_MESSAGE, _MAX_HEADER_CHARS)
        header.append(text)

    def _body(self, header: str) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        _, _, channel = header.rpartition(CHANNEL)
        if recipient is not None and self.tool_names:
            yield from self.attempt(self._call(recipient[1]), "")
        elif channel.strip().startswith("analysis"):
            if (yield from self.copy_reasoning(_BODY_END)) == START:
                yield from self._message(START)
        else:
            self.mark()

    def _call(self, name: str) -> Steps[None]:
        call = Call(self, name)
        yield from self.arguments(call)
        following = yield from self.skip_space()
        if following not in ("<", ""):
            raise MalformedCallError
        call.end()
