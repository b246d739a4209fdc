"""Calls that the request asks for: a grammar lets the model write nothing else.

The answer is then JSON alone: the arguments of the one named tool, or a list of calls
``[{"name": …, "parameters": {…}}]``. It is sent as it comes, since it can't break.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo_core.errors import InvalidRequestError
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server.tool_parsers.json_scanner import JsonScanner
from octavo_server.tool_parsers.scanner import MAX_CALLS, Call, Steps

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
# What else can say which members an object has.
_MEMBERS = frozenset(
    {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}
)
# Formats that a grammar can hold. Others are the tool's own business, unless it is strict.
_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uri", "uuid"),
    }
)


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
    function: Mapping[str, Any], after: str | None = None
) -> StructuredOutputsParams:
    """Return the constraint under which an answer is the arguments of `function`.

    Args:
        function: ``name``, maybe ``parameters`` and ``strict``.
        after: What ends the reasoning that comes first, or None if none does.

    Raises:
        InvalidRequestError: The schema is too long.
    """
    return _constraint(_parameters(function, "#"), [function], after)


def forced_calls(
    functions: Sequence[Mapping[str, Any]], *, is_parallel: bool, after: str | None = None
) -> StructuredOutputsParams:
    """Return the constraint under which an answer is a list of calls of `functions`.

    Args:
        functions: Each has a ``name``, maybe ``parameters`` and ``strict``.
        is_parallel: False allows one call only.
        after: As for `forced_arguments`.

    Raises:
        InvalidRequestError: The schemas are too long.
    """
    roots = [f"#/$defs/tool_{index}" for index in range(len(functions))]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "parameters": {"$ref": root}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function, root in zip(functions, roots, strict=True)
    ]
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CALLS if is_parallel else 1,
        "items": {"anyOf": calls},
        "$defs": {
            f"tool_{index}": _parameters(function, root)
            for index, (function, root) in enumerate(zip(functions, roots, strict=True))
        },
    }
    return _constraint(schema, functions, after)


def _constraint(
    schema: dict[str, Any], functions: Sequence[Mapping[str, Any]], after: str | None
) -> StructuredOutputsParams:
    if not all(map(_is_strict, functions)):
        # Keywords that no grammar can hold are then the tool's own business.
        schema = {**schema, "x-guidance": {"lenient": True}}
    try:
        return StructuredOutputsParams(json=json.dumps(schema), after=after)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"tools can't be enforced: {error.message} Leave tools out, or let tool_choice be "
            f"'auto'.",
            field="tools",
        ) from None


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def _parameters(function: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments, without comments.

    Args:
        root: Where the schema will be, as a reference.
    """
    schema = function.get("parameters") or {}
    kept: dict[str, Any] = _constraining(schema, root, _is_strict(function))
    # Arguments are an object, even if the schema forgets to say so. Members that it does not name
    # are none of the tool's, and small models would never come to an end of them.
    if not kept.keys() & _MEMBERS:
        kept = {"properties": {}, **kept, "type": "object", "additionalProperties": False}
    elif "type" not in kept and "$ref" not in kept:
        kept["type"] = "object"
    return kept


def _constraining(schema: Any, root: str, is_strict: bool) -> Any:
    """Return a schema without comments, with its references below `root`."""
    if isinstance(schema, list):
        return [_constraining(item, root, is_strict) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _COMMENTS or (key == "format" and not is_strict and value not in _FORMATS):
            continue
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _constraining(item, root, is_strict) for name, item in value.items()}
        elif key in _PLAIN_VALUES:
            kept[key] = value
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            kept[key] = root + value[1:]
        else:
            kept[key] = _constraining(value, root, is_strict)
    return kept
