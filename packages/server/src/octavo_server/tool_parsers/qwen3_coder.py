"""``<function=name><parameter=key>value</parameter></function>`` in tags: Qwen3-Coder.

Values are bare text. Which of them is a number or a list is known from the tool's schema alone.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from octavo_server.tool_parsers.json_scanner import JsonScanner
from octavo_server.tool_parsers.scanner import (
    MAX_TOOL_NAME_CHARS,
    Call,
    MalformedCallError,
    Markers,
    Steps,
    Write,
)

OPEN = "<tool_call>"
FUNCTION = "<function="
PARAMETER = "<parameter="
CLOSE_PARAMETER = "</parameter>"
CLOSE_FUNCTION = "</function>"
CLOSE = "</tool_call>"

# Models leave out the outer tag at times.
_OPEN = Markers(OPEN, FUNCTION)
_NAME_END = Markers(">")
_VALUE_END = Markers(CLOSE_PARAMETER)
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderParser(JsonScanner):
    """Calls in tags, each argument in tags of its own. Text is sent as it comes."""

    name = "qwen3_coder"

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        while marker := (yield from self.copy_until(_OPEN)):
            yield from self.attempt(self._call(marker == FUNCTION), marker)

    def _call(self, is_bare: bool) -> Steps[None]:
        if not is_bare:
            yield from self.skip_space()
            yield from self.expect(FUNCTION)
        name, _ = yield from self.take_until(_NAME_END, MAX_TOOL_NAME_CHARS)
        self.check_name(name)
        call = Call(self, name)
        call.write("{")
        keys: set[str] = set()
        while True:
            yield from self.skip_space()
            if (yield from self.accept(CLOSE_FUNCTION)):
                break
            yield from self.expect(PARAMETER)
            key, _ = yield from self.take_until(_NAME_END, MAX_TOOL_NAME_CHARS)
            if key in keys:
                raise MalformedCallError
            call.write((", " if keys else "") + json.dumps(key) + ": ")
            keys.add(key)
            yield from self._value(call.write, _types(self.parameters_of(name), key))
        call.write("}")
        yield from self.expect_or_end(CLOSE)
        call.end()

    def _value(self, write: Write, types: set[str]) -> Steps[None]:
        text = _Value(write if types <= {"string"} else None)
        if not (yield from self.copy_until(_VALUE_END, text.write)):
            raise MalformedCallError
        value = text.end()
        if value is not None:
            write(_json_text(value, types))


class _Value:
    """The text between two tags, without the line breaks next to them.

    Args:
        write: Takes the text as a JSON string, as it comes; None if its kind is told by the whole.
    """

    def __init__(self, write: Write | None) -> None:
        self._write = write
        self._pieces: list[str] = []
        self._held = ""
        self._began = False

    def write(self, piece: str) -> None:
        if not self._began:
            self._began = True
            piece = piece.removeprefix("\n")
            if self._write is not None:
                self._write('"')
        text = self._held + piece
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._write is None:
            self._pieces.append(text)
        elif text:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> str | None:
        """Return the text, if it was not passed on."""
        if self._write is None:
            return "".join(self._pieces)
        self._write('"' if self._began else '""')
        return None


def _types(parameters: dict[str, Any], key: str) -> set[str]:
    """Return the types that a parameter may have; text if the schema does not tell."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return {"string"}
    branches = [schema, *(b for name in ("anyOf", "oneOf") for b in schema.get(name) or ())]
    types: set[str] = set()
    for branch in branches:
        kind = branch.get("type") if isinstance(branch, dict) else None
        types |= {kind} if isinstance(kind, str) else set(kind or ())
    return types or {"string"}


def _json_text(text: str, types: set[str]) -> str:
    """Return a value as JSON: what the types allow, else text."""
    value = _WORDS.get(text.strip(), text.strip())
    try:
        parsed = msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        value = json.dumps(text, ensure_ascii=False)
    else:
        kind = _kind(parsed)
        if "string" in types and kind not in types:
            value = json.dumps(text, ensure_ascii=False)
    return value


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "text", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")
