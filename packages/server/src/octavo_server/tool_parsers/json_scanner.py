"""JSON as models write it, read as it comes.

What is passed on is valid JSON. Slips whose meaning is beyond doubt are mended on the way:
line breaks inside strings, backslashes before letters that need none, Python's ``True``.
"""

from __future__ import annotations

import json
import re

import msgspec

from octavo_server.tool_parsers.scanner import (
    MAX_TOOL_NAME_CHARS,
    Call,
    MalformedCallError,
    Scanner,
    Steps,
    Write,
)

MAX_DEPTH = 64
_MAX_WORD_CHARS = 400
_MAX_KEY_CHARS = 1024

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*+')
_WORD = re.compile(r"[-+.0-9A-Za-z]*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
_WORDS = {
    **{word: word for word in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner(Scanner):
    """Reads JSON values, and calls that are written as one."""

    # Both spellings are in use, in one family sometimes.
    name_keys = frozenset({"name"})
    arguments_keys = frozenset({"arguments", "parameters"})
    # Formats without a marker take only names that they know for a call.
    needs_known_name = False

    def json_value(self, write: Write, depth: int = 0) -> Steps[None]:
        """Pass one value on."""
        if depth > MAX_DEPTH:
            raise MalformedCallError
        first = yield from self.peek()
        if first == "{":
            yield from self._object(write, depth)
        elif first == "[":
            yield from self._array(write, depth)
        elif first == '"':
            yield from self.json_string(write)
        else:
            yield from self._word(write)

    def _object(self, write: Write, depth: int) -> Steps[None]:
        following = yield from self._open(write)
        if following == "}":
            write(self.take(1))
            return
        while True:
            yield from self.json_string(write)
            if (yield from self.copy_space(write)) != ":":
                raise MalformedCallError
            write(self.take(1))
            yield from self.copy_space(write)
            yield from self.json_value(write, depth + 1)
            if (yield from self._goes_on(write, "}")):
                return

    def _array(self, write: Write, depth: int) -> Steps[None]:
        following = yield from self._open(write)
        if following == "]":
            write(self.take(1))
            return
        while True:
            yield from self.json_value(write, depth + 1)
            if (yield from self._goes_on(write, "]")):
                return

    def _open(self, write: Write) -> Steps[str]:
        """Take a bracket, and white space unless nothing else is inside."""
        write(self.take(1))
        space: list[str] = []
        following = yield from self.copy_space(space.append)
        if following not in ("}", "]"):
            write("".join(space))
        return following

    def _goes_on(self, write: Write, closing: str) -> Steps[bool]:
        """Take a comma, or the closing bracket; return True for that."""
        following = yield from self.copy_space(write)
        if following not in (",", closing) or not following:
            raise MalformedCallError
        write(self.take(1))
        if following == closing:
            return True
        yield from self.copy_space(write)
        return False

    def json_string(self, write: Write) -> Steps[None]:
        """Pass a string on, quotes included."""
        if (yield from self.peek()) != '"':
            raise MalformedCallError
        write(self.take(1))
        while True:
            if plain := self.take_run(_PLAIN):
                write(plain)
            following = yield from self.peek()
            if not following:
                raise MalformedCallError
            if following == '"':
                write(self.take(1))
                return
            if following == "\\":
                yield from self._escape(write)
            elif following < " ":
                write(json.dumps(self.take(1))[1:-1])

    def _escape(self, write: Write) -> Steps[None]:
        self.take(1)
        letter = yield from self.peek()
        if not letter:
            raise MalformedCallError
        if letter == "u":
            yield from self._unicode_escape(write)
        elif letter in _ESCAPES:
            write("\\" + self.take(1))
        elif letter == "'":
            write(self.take(1))
        else:
            # Such as \d of a regular expression: the backslash was meant. Whatever follows is
            # read as if there had been none.
            write("\\\\")

    def _unicode_escape(self, write: Write) -> Steps[None]:
        self.take(1)
        digits = ""
        while len(digits) < 4:
            digit = yield from self.peek()
            if digit not in _HEX or not digit:
                raise MalformedCallError
            digits += self.take(1)
        write("\\u" + digits)

    def take_word(self) -> Steps[str]:
        """Take a number or a name such as ``true``, which must not be long."""
        pieces: list[str] = []
        num_chars = 0
        while True:
            piece = self.take_run(_WORD)
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > _MAX_WORD_CHARS:
                raise MalformedCallError
            # More may come only if all that is there belonged to it.
            following = yield from self.peek()
            if not following or not _WORD.match(following).end():  # type: ignore[union-attr]  # matches ""
                return "".join(pieces)

    def _word(self, write: Write) -> Steps[None]:
        word = yield from self.take_word()
        if word in _WORDS:
            write(_WORDS[word])
        elif _NUMBER.fullmatch(word):
            write(word)
        else:
            raise MalformedCallError

    def string_value(self, max_chars: int) -> Steps[str]:
        """Take a string and return what it says."""
        pieces: list[str] = []
        num_chars = 0

        def keep(piece: str) -> None:
            nonlocal num_chars
            num_chars += len(piece)
            if num_chars > max_chars:
                raise MalformedCallError
            pieces.append(piece)

        yield from self.json_string(keep)
        try:
            return msgspec.json.decode("".join(pieces), type=str)
        except msgspec.DecodeError:
            # Half a surrogate pair.
            raise MalformedCallError from None

    # Calls

    def call_object(self, call: Call) -> Steps[None]:
        """Read ``{"name": …, "arguments": …}`` in any order; other members mean nothing."""
        yield from self.skip_space()
        yield from self.expect("{")
        has_arguments = False
        while True:
            yield from self.skip_space()
            key = yield from self.string_value(_MAX_KEY_CHARS)
            yield from self.skip_space()
            yield from self.expect(":")
            yield from self.skip_space()
            if key in self.name_keys and call.name is None:
                call.name = yield from self._call_name()
            elif key in self.arguments_keys and not has_arguments:
                has_arguments = True
                yield from self.arguments(call)
            elif key in self.name_keys | self.arguments_keys:
                raise MalformedCallError
            else:
                yield from self.json_value(_ignore)
            following = yield from self.skip_space()
            if following not in (",", "}") or not following:
                raise MalformedCallError
            self.take(1)
            if following == "}":
                break
        if not call.name:
            raise MalformedCallError

    def _call_name(self) -> Steps[str]:
        name = yield from self.string_value(MAX_TOOL_NAME_CHARS)
        self.check_name(name)
        return name

    def check_name(self, name: str) -> None:
        """Refuse what can't be the name of a tool."""
        if not name or (self.needs_known_name and name not in self.tool_names):
            raise MalformedCallError

    def arguments(self, call: Call) -> Steps[None]:
        """Read a call's arguments: an object, or one that is written into a string, or null."""
        first = yield from self.skip_space()
        if first == "{":
            yield from self.json_value(call.write)
        elif first == '"':
            call.write(_object_text((yield from self._long_string())))
        elif (yield from self.take_word()) not in ("null", "None"):
            raise MalformedCallError

    def _long_string(self) -> Steps[str]:
        return (yield from self.string_value(1 << 62))


def _object_text(text: str) -> str:
    if not text.strip():
        return "{}"
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        raise MalformedCallError from None
    return text


def _ignore(text: str) -> None:
    pass
