from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo_core.errors import InvalidRequestError
from octavo_core.structured_outputs import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é"]}}}


def test_a_schema_may_be_a_dict() -> None:
    params = StructuredOutputsParams(json=SCHEMA)  # type: ignore[arg-type]
    assert isinstance(params.json, str)
    assert msgspec.json.decode(params.json) == SCHEMA
    assert list(msgspec.json.decode(params.json)["properties"]) == ["b", "a"], "answers' order"
    # The key of the cache of grammars, the same as for a schema that came as text.
    assert hash(params) == hash(StructuredOutputsParams(json=params.json))
    assert msgspec.json.decode(msgspec.json.encode(params), type=StructuredOutputsParams) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("json", dict), ("json", ["a"]), ("json", True), ("json", {"enum": [object()]})),
        *(("regex", 5), ("grammar", b"x"), ("choice", "yes"), ("choice", [1, 2])),
        ("json_object", "yes"),
    ],
)
def test_a_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"structured_outputs\.{name}"):
        StructuredOutputsParams(**{name: value})
