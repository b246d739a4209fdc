"""Calls that the request asks for: a grammar lets the model write nothing else.

The answer is then JSON alone: the arguments of the one named tool, or a list of calls
``[{"name": …, "parameters": {…}}]``. It is sent as it comes, since it can't break.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server.tool_parsers.json_scanner import JsonScanner
from octavo_server.tool_parsers.scanner import Call, Steps

# Words of a schema that explain and don't constrain: half the size of a usual list of tools.
_COMMENTS = frozenset(
    {
        "description",
        "title",
        "examples",
        "example",
        "default",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
    }
)
# Keywords whose value maps names of any kind to schemas.
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_PLAIN_VALUES = frozenset({"enum", "const", "required", "type"})
_ANY_OBJECT = {"type": "object"}


class ForcedArgumentsParser(JsonScanner):
    """The whole answer is the arguments of one tool."""

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        (name,) = self.tool_names
        if (yield from self.copy_space(self.text)) == "{":
            yield from self.attempt(self._call(name), "")
        yield from self.copy_rest()

    def _call(self, name: str) -> Steps[None]:
        call = Call(self, name)
        yield from self.arguments(call)
        call.end()


class ForcedCallsParser(JsonScanner):
    """The whole answer is a list of calls."""

    def parse(self) -> Steps[None]:
        """Read the whole text."""
        if (yield from self.copy_space(self.text)) == "[":
            opening = self.take(1)
            while (yield from self.attempt(self._call(), opening)):
                opening = ""
                following = yield from self.skip_space()
                if following not in (",", "]") or not following:
                    break
                self.take(1)
                if following == "]":
                    break
            yield from self.skip_space()
        yield from self.copy_rest()

    def _call(self) -> Steps[None]:
        call = Call(self)
        yield from self.call_object(call)
        call.end()


def forced_arguments(
    function: Mapping[str, Any], reasoning_end: str | None = None
) -> StructuredOutputsParams:
    """Return the constraint under which an answer is the arguments of `function`.

    Args:
        function: ``name``, maybe ``parameters`` and ``strict``.
        reasoning_end: What ends the reasoning that may come first, or None if none may.
    """
    if reasoning_end is None:
        return StructuredOutputsParams(json=json.dumps(_schema(function)))
    return _grammar(["answer: arguments_0", _arguments_rule(0, function)], reasoning_end)


def forced_calls(
    functions: Sequence[Mapping[str, Any]],
    *,
    is_parallel: bool,
    reasoning_end: str | None = None,
) -> StructuredOutputsParams:
    """Return the constraint under which an answer is a list of calls of `functions`.

    Each tool's schema stays a root of its own in the grammar, so that ``$ref`` works in it.

    Args:
        functions: Each has a ``name``, maybe ``parameters`` and ``strict``.
        is_parallel: False allows one call only.
        reasoning_end: As for `forced_arguments`.
    """
    more = ' ("," call)*' if is_parallel else ""
    rules = [
        f'answer: "[" call{more} "]"',
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        opening = '{"name": ' + json.dumps(function["name"]) + ', "parameters": '
        rules.append(f'call_{index}: {json.dumps(opening)} arguments_{index} "}}"')
        rules.append(_arguments_rule(index, function))
    return _grammar(rules, reasoning_end)


def _grammar(rules: list[str], reasoning_end: str | None) -> StructuredOutputsParams:
    """Write rules in the Lark notation of llguidance, which takes JSON schemas inside."""
    if reasoning_end is None:
        head = ["start: answer"]
    else:
        # `suffix` ends the rule at the first place where it fits.
        head = [
            "start: reasoning answer",
            f"reasoning[suffix={json.dumps(reasoning_end)}]: /(?s:.*)/",
        ]
    return StructuredOutputsParams(grammar="\n".join([*head, *rules]))


def _arguments_rule(index: int, function: Mapping[str, Any]) -> str:
    return f"arguments_{index}: %json {json.dumps(_schema(function))}"


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or _ANY_OBJECT
    stripped: dict[str, Any] = _without_comments(schema)
    if "type" not in stripped and "$ref" not in stripped:
        # Arguments are an object, even if the schema forgets to say so.
        stripped["type"] = "object"
    if stripped.get("type") == "object" and not stripped.keys() - {"type"}:
        # Nothing is said about any member: a tool without parameters.
        stripped |= {"properties": {}, "additionalProperties": False}
    if function.get("strict") is not True:
        # Keywords that no grammar can hold are then the tool's own business.
        stripped["x-guidance"] = {"lenient": True, **stripped.get("x-guidance", {})}
    return stripped


def _without_comments(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_comments(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _COMMENTS:
            continue
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _without_comments(item) for name, item in value.items()}
        elif key in _PLAIN_VALUES:
            kept[key] = value
        else:
            kept[key] = _without_comments(value)
    return kept
