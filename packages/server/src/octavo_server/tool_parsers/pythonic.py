"""``[get_weather(city="Paris"), now()]`` as the whole answer: Llama 3.2 and 4, LFM2 and others.

The text is never evaluated: only literals are read, and written down as JSON.
"""

from __future__ import annotations

import json
import math
import re

from octavo_server.tool_parsers.json_scanner import MAX_DEPTH, JsonScanner
from octavo_server.tool_parsers.scanner import (
    MAX_TOOL_NAME_CHARS,
    Call,
    MalformedCallError,
    Markers,
    Steps,
    Write,
)

_OPEN = Markers("<|python_start|>", "<|tool_call_start|>")
_CLOSE = Markers("<|python_end|>", "<|tool_call_end|>")
_NAME = re.compile(r"[A-Za-z0-9_.]*+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f\"]*+") for quote in "\"'"}
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    **{word: word for word in ("true", "false", "null")},
}
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", "'": "'", '"': '"'}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class PythonicParser(JsonScanner):
    """Calls are written as Python does. The answer must begin with one of a known tool.

    Control tokens around the list, which some models write, are no part of the answer.
    """

    name = "pythonic"
    needs_special_tokens = True
    needs_known_name = True

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        if (yield from self.copy_space(self.text)) == "[":
            yield from self._list("")
        while marker := (yield from self.copy_until(_OPEN)):
            if (yield from self.skip_space()) == "[":
                yield from self._list(marker)
            else:
                self.text(marker)

    def _list(self, opening: str) -> Steps[None]:
        opening += self.take(1)
        while (yield from self.attempt(self._call(), opening)):
            opening = ""
            following = yield from self.skip_space()
            if following not in (",", "]") or not following:
                break
            self.take(1)
            if following == "]":
                break
        yield from self.skip_space()
        for marker in ("<|python_end|>", "<|tool_call_end|>"):
            yield from self.accept(marker)

    def _call(self) -> Steps[None]:
        yield from self.skip_space()
        name = yield from self._name(MAX_TOOL_NAME_CHARS)
        self.check_name(name)
        call = Call(self, name)
        yield from self.expect("(")
        call.write("{")
        keys: set[str] = set()
        while (yield from self.skip_space()) != ")":
            key = yield from self._name(MAX_TOOL_NAME_CHARS)
            if not key or key in keys:
                raise MalformedCallError
            call.write(("," if keys else "") + json.dumps(key) + ":")
            keys.add(key)
            yield from self.skip_space()
            yield from self.expect("=")
            yield from self.skip_space()
            yield from self._value(call.write, 0)
            if not (yield from self._comma(")")):
                break
        self.take(1)
        call.write("}")
        call.end()

    def _name(self, max_chars: int) -> Steps[str]:
        pieces: list[str] = []
        while True:
            pieces.append(self.take_run(_NAME))
            if sum(map(len, pieces)) > max_chars:
                raise MalformedCallError
            following = yield from self.peek()
            if not following or not (
                following.isascii() and (following.isalnum() or following in "_.")
            ):
                return "".join(pieces)

    def _comma(self, closing: str) -> Steps[bool]:
        """Take a comma and return True, or see the closing bracket and return False."""
        following = yield from self.skip_space()
        if following == closing:
            return False
        if following != ",":
            raise MalformedCallError
        self.take(1)
        return (yield from self.skip_space()) != closing

    def _value(self, write: Write, depth: int) -> Steps[None]:
        if depth > MAX_DEPTH:
            raise MalformedCallError
        first = yield from self.peek()
        if first and first in "\"'":
            yield from self._string(write)
        elif first and first in "[(":
            yield from self._sequence(write, depth)
        elif first == "{":
            yield from self._dict(write, depth)
        else:
            write(_word((yield from self.take_word())))

    def _sequence(self, write: Write, depth: int) -> Steps[None]:
        closing = "]" if self.take(1) == "[" else ")"
        write("[")
        comma = ""
        if (yield from self.skip_space()) != closing:
            while True:
                write(comma)
                comma = ","
                yield from self._value(write, depth + 1)
                if not (yield from self._comma(closing)):
                    break
        self.take(1)
        write("]")

    def _dict(self, write: Write, depth: int) -> Steps[None]:
        self.take(1)
        write("{")
        comma = ""
        if (yield from self.skip_space()) != "}":
            while True:
                write(comma)
                comma = ","
                if (yield from self.peek()) not in ('"', "'"):
                    raise MalformedCallError
                yield from self._string(write)
                yield from self.skip_space()
                yield from self.expect(":")
                write(":")
                yield from self.skip_space()
                yield from self._value(write, depth + 1)
                if not (yield from self._comma("}")):
                    break
        self.take(1)
        write("}")

    def _string(self, write: Write) -> Steps[None]:
        quote = self.take(1)
        write('"')
        while True:
            if plain := self.take_run(_PLAIN[quote]):
                write(plain)
            following = yield from self.peek()
            if not following:
                raise MalformedCallError
            self.take(1)
            if following == quote:
                write('"')
                return
            if following == "\\":
                yield from self._python_escape(write)
            else:
                # A line break, or the other kind of quote.
                write(json.dumps(following)[1:-1])

    def _python_escape(self, write: Write) -> Steps[None]:
        letter = yield from self.peek()
        if not letter:
            raise MalformedCallError
        if letter in _SIMPLE_ESCAPES:
            self.take(1)
            write(json.dumps(_SIMPLE_ESCAPES[letter])[1:-1])
        elif letter in _HEX_ESCAPES:
            self.take(1)
            write((yield from self._hex_escape(_HEX_ESCAPES[letter])))
        else:
            write("\\\\")

    def _hex_escape(self, num_digits: int) -> Steps[str]:
        digits = ""
        while len(digits) < num_digits:
            if not (yield from self.peek()):
                raise MalformedCallError
            digits += self.take(1)
        try:
            return json.dumps(chr(int(digits, 16)))[1:-1]
        except (ValueError, OverflowError):
            raise MalformedCallError from None


def _word(word: str) -> str:
    """Return a number or constant of Python as JSON."""
    if word in _WORDS:
        return _WORDS[word]
    try:
        return str(int(word))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        raise MalformedCallError from None
    if not math.isfinite(number):
        raise MalformedCallError
    return repr(number)
