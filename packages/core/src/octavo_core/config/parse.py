"""Reads the value of a setting as people write it, and says what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo_core.config.field_types import VISIBLE_ASCII
from octavo_core.config.option import GROUPS, Option, bare_type
from octavo_core.errors import ConfigError

_WRONG_TYPE = re.compile(r"Expected `(int|float|bool)(?: \| str)?(?: \| null)?`, got .*")
_IN_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_BOUND = re.compile(r"Expected `\w+` (<=|>=|<|>) (-?[\d.]+)")
_BOUND_IN_WORDS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)(B?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_value(option: Option, value: Any, source: str) -> Any:
    """Convert one value to its field's type.

    Args:
        option: The setting.
        value: What was given: a text to be read, or a value.
        source: Where it was given.

    Raises:
        ConfigError: Names the setting, the value, where it was given, and what is wrong.
    """
    words = _words(option.type)
    if isinstance(value, str) and option.unit and value not in words:
        value = parse_quantity(option.name, value, source, words)
    if option.is_list:
        value = _parse_list(option, value, source)
    try:
        converted = msgspec.convert({option.name: value}, GROUPS[option.group], strict=False)
    except msgspec.ValidationError as error:
        reason = _explain(error, option.type)
        raise _wrong_value(option, value, source, reason) from None
    return getattr(converted, option.name)


def parse_quantity(name: str, text: str, source: str, words: Sequence[str] = ()) -> int:
    """Read ``4096``, ``8k`` (8,000), ``8K`` (8,192), ``512MiB`` or ``80GB`` (80 × 10⁹).

    Args:
        name: Of the setting.
        text: What was given.
        source: Where it was given.
        words: What else the setting takes, for the error.

    Raises:
        ConfigError: It is no number with a unit.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{name} is {text!r} (from {source}): write a number, with a unit such as k, M, GiB "
            f"if you like{''.join(f', or {word}' for word in words)}.",
            field=name,
        )
    number, prefix, binary, byte = match.groups()
    base = 1024 if binary or (prefix.isupper() and not byte) else 1000
    return int(float(number) * base ** _POWERS[prefix.lower()])


def _parse_list(option: Option, value: Any, source: str) -> list[Any]:
    """Read one text or several: a JSON list, or texts with commas between, or one text.

    A secret is never taken apart: the halves would be keys, too.
    """
    if not isinstance(value, str):
        parts = value if isinstance(value, list | tuple) else [value]
        return [
            item
            for part in parts
            for item in (_parse_list(option, part, source) if isinstance(part, str) else [part])
        ]
    if option.is_secret:
        return [value]
    if not value.startswith("["):
        return [part.strip() for part in value.split(",")]
    try:
        return list(msgspec.json.decode(value, type=list[Any]))
    except msgspec.DecodeError as error:
        raise _wrong_value(option, value, source, f"it is no JSON list: {error}") from None


def _wrong_value(option: Option, value: Any, source: str, reason: str) -> ConfigError:
    shown = "not usable" if option.is_secret else repr(value)
    return ConfigError(f"{option.name} is {shown} (from {source}): {reason}.", field=option.name)


def _explain(error: msgspec.ValidationError, field_type: Any) -> str:
    """Say what is wrong without Python's names of types and msgspec's path."""
    words = _words(field_type)
    reason = str(error).split(" - at ")[0]
    if reason.startswith("Invalid enum value"):
        return f"it must be {', '.join(words[:-1])} or {words[-1]}"
    if (bound := _BOUND.fullmatch(reason)) is not None:
        return f"it must be {_BOUND_IN_WORDS[bound[1]]} {bound[2].removesuffix('.0')}"
    if "matching regex" in reason and VISIBLE_ASCII not in reason:
        return "it must start with a letter, _ or :, and go on with these and digits"
    if reason.startswith("Expected `str"):
        return "it must be a text"
    if "length >= 1" in reason:
        return "it is empty"
    if VISIBLE_ASCII in reason:
        return "it must consist of visible ASCII characters"
    match = _WRONG_TYPE.fullmatch(reason)
    if match is None:
        return reason
    return f"it must be {' or '.join([_IN_WORDS[match[1]], *words])}"


def _words(field_type: Any) -> tuple[str, ...]:
    """Return the words that a field takes beside a number."""
    field_type = bare_type(field_type)
    kinds = field_type.types if isinstance(field_type, msgspec.inspect.UnionType) else (field_type,)
    return tuple(
        str(value)
        for kind in kinds
        if isinstance(kind, msgspec.inspect.LiteralType)
        for value in kind.values
    )
