"""JSON schemas as requests bring them: checked, with the place of what is wrong, and bounded.

What can be said of a schema without compiling it is said here. A keyword that nobody enforces
may not be silently ignored, for the answer is promised to validate; annotations may.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from octavo_core.errors import InvalidRequestError

MAX_DEPTH = 32

_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))

# Where a schema has schemas: as the value, in a list, or by name.
_SCHEMA_KEYS = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_LIST_KEYS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

# Pairs of a lower and an upper bound.
_BOUNDS = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)

# Bounds beyond these are narrowed to them, since what is between both is valid all the same. The
# compiler keeps bounds as doubles, of which this is the last one that fits 64 bits.
_MAX_INTEGER = 2**63 - 1024

# Formats of the JSON Schema standard that can't be enforced. Others that nobody knows, such as
# OpenAPI's "int32", are annotations by that standard.
_UNSUPPORTED_FORMATS = frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
_FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uri", "uuid"),
    )
)


def check_json_schema(text: str) -> dict[str, Any]:
    """Decode a schema and check it, as far as that can be done without compiling it.

    Returns:
        The schema without its unknown formats, as an object.

    Raises:
        InvalidRequestError: It is no JSON, no schema, nested too deep, or has a bound that
            can't be; the message has the place as a JSON pointer.
    """
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise _invalid("", f"is not valid JSON: {reason}") from None
    if _depth(schema) > MAX_DEPTH:
        raise _invalid("", f"is nested deeper than {MAX_DEPTH} levels")
    checked = _check(schema, "", schema, _is_lenient(schema))
    if checked is False:
        raise _invalid("", "is false, which allows no text at all")
    return {} if checked is True else checked


def find_keyword(schema: Any, keyword: str, place: str = "") -> str | None:
    """Return the JSON pointer of the first schema that has `keyword`, if there is one."""
    if not isinstance(schema, dict):
        return None
    if keyword in schema:
        return place
    for path, child in _children(schema):
        found = find_keyword(child, keyword, place + path)
        if found is not None:
            return found
    return None


def _is_lenient(schema: Any) -> bool:
    """True if whoever wrote the schema wants what can't be enforced to be ignored."""
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("lenient") is True


def _check(schema: Any, place: str, root: Any, is_lenient: bool) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _invalid(place, f"is {_shown(schema)}; a schema is an object, true or false")
    _check_types(schema, place)
    _check_ref(schema, place, root)
    _check_bounds(schema, place)
    checked = dict(schema)
    _narrow_bounds(checked)
    _check_format(checked, place, is_lenient)
    for name in _SCHEMA_KEYS:
        if name in schema and not (name == "items" and isinstance(schema[name], list)):
            checked[name] = _check(schema[name], f"{place}/{name}", root, is_lenient)
    for name in (*_LIST_KEYS, "items"):
        if name in schema and name in _LIST_KEYS and not isinstance(schema[name], list):
            raise _invalid(f"{place}/{name}", f"is {_shown(schema[name])}; it must be a list")
        if isinstance(schema.get(name), list):
            checked[name] = [
                _check(item, f"{place}/{name}/{index}", root, is_lenient)
                for index, item in enumerate(schema[name])
            ]
    for name in _MAP_KEYS:
        if name in schema:
            if not isinstance(schema[name], dict):
                raise _invalid(
                    f"{place}/{name}", f"is {_shown(schema[name])}; it must be an object"
                )
            checked[name] = {
                key: _check(item, f"{place}/{name}/{_escape(key)}", root, is_lenient)
                for key, item in schema[name].items()
            }
    _tell_variants_apart(checked)
    return checked


def _check_types(schema: dict[str, Any], place: str) -> None:
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in _TYPES:
            raise _invalid(
                f"{place}/type", f"is {_shown(name)}; types are {', '.join(sorted(_TYPES))}"
            )
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise _invalid(f"{place}/enum", "must be a list of at least one value")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _invalid(f"{place}/required", "must be a list of names")
    if not isinstance(schema.get("pattern", ""), str):
        raise _invalid(f"{place}/pattern", "must be a string")


def _check_ref(schema: dict[str, Any], place: str, root: Any) -> None:
    ref = schema.get("$ref")
    if ref is None:
        return
    if not isinstance(ref, str):
        raise _invalid(f"{place}/$ref", f"is {_shown(ref)}; it must be a string")
    if ref.startswith("#/") or ref == "#":
        if not _resolves(root, ref):
            raise _invalid(f"{place}/$ref", f"is {_shown(ref)}, which the schema does not have")
    elif not ref.startswith("#"):
        raise _invalid(
            f"{place}/$ref",
            f"is {_shown(ref)}; only places in the same schema can be referred to (#/…)",
        )


def _resolves(root: Any, ref: str) -> bool:
    node = root
    for part in ref.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            # A pointer is in a URI, so a name may be written in percent signs.
            return "%" in ref
    return True


def _check_bounds(schema: dict[str, Any], place: str) -> None:
    for low, high in _BOUNDS:
        values = {}
        for name in (low, high):
            value = schema.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise _invalid(f"{place}/{name}", f"is {_shown(value)}; it must be a number")
                if low != "minimum" and (value < 0 or value != int(value)):
                    raise _invalid(f"{place}/{name}", f"is {value}; it must be a whole number")
                values[name] = value
        if len(values) == 2 and values[low] > values[high]:
            raise _invalid(place, f"has a {low} of {values[low]}, above its {high}, {values[high]}")


def _narrow_bounds(schema: dict[str, Any]) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(low, int) and low < -_MAX_INTEGER:
        schema["minimum"] = -_MAX_INTEGER
    if isinstance(high, int) and high > _MAX_INTEGER:
        schema["maximum"] = _MAX_INTEGER


def _check_format(schema: dict[str, Any], place: str, is_lenient: bool) -> None:
    name = schema.get("format")
    if not is_lenient and name in _UNSUPPORTED_FORMATS:
        raise _invalid(f"{place}/format", f"is {_shown(name)}, which is not supported")
    if "format" in schema and name not in _FORMATS:
        del schema["format"]


def _tell_variants_apart(schema: dict[str, Any]) -> None:
    """Require the property that a discriminator names, which tells variants of oneOf apart.

    With OpenAPI it has to be there, but pydantic doesn't require what has a default.
    """
    discriminator = schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(name, str) and "oneOf" in schema:
        schema["oneOf"] = [{"allOf": [item, {"required": [name]}]} for item in schema["oneOf"]]


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly below one, with their pointers from there."""
    for name in (*_SCHEMA_KEYS, *_LIST_KEYS):
        value = schema.get(name)
        if isinstance(value, list):
            yield from ((f"/{name}/{index}", item) for index, item in enumerate(value))
        elif value is not None:
            yield f"/{name}", value
    for name in _MAP_KEYS:
        value = schema.get(name)
        if isinstance(value, dict):
            yield from ((f"/{name}/{_escape(key)}", item) for key, item in value.items())


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        depth += 1
    return depth - 1


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:80] + "…"


def _invalid(place: str, problem: str) -> InvalidRequestError:
    where = f"the JSON schema's {place}" if place else "the JSON schema"
    return InvalidRequestError(f"{where} {problem}.", field="structured_outputs")
