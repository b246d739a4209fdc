"""JSON of any kind inside a body: schemas, metadata. Bounded in size, since nothing else is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

MAX_JSON_NODES = 50_000
MAX_JSON_MEMBERS = 4096


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_JSON_MEMBERS:
        raise ValueError(f"it has {len(value)} members; it must have at most {MAX_JSON_MEMBERS}")
    num_nodes = 0
    waiting: list[Any] = [value]
    while waiting:
        node = waiting.pop()
        num_nodes += 1
        if num_nodes > MAX_JSON_NODES:
            raise ValueError(f"it has more than {MAX_JSON_NODES} values, which is the limit")
        if isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return value


# The body's own limit on depth (100) holds inside as well.
JsonObject = Annotated[
    dict[str, Any],
    AfterValidator(_bounded),
    WithJsonSchema({"type": "object", "properties": {}, "maxProperties": MAX_JSON_MEMBERS}),
]
