"""Structured output: from a body's fields to a constraint, tried out before the engine gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo_core.errors import InvalidRequestError
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_core.wire import EngineCoreRequest
from octavo_server.api.protocol import GenerationRequest, SamplingBody
from octavo_server.grammar_checker import GrammarChecker

_GUIDED = ("json", "json_object", "regex", "choice", "grammar")


OwnConstraint = Mapping[str, Mapping[str, Any]]
"""What asks for a constraint in an API's own way: a field, with the parameters that it means."""


def response_format(body: GenerationRequest) -> OwnConstraint:
    """Return what asks for a constraint in the way of OpenAI's completions and chats."""
    asked = body.response_format
    if asked is not None and asked.type == "json_object":
        return {"response_format": {"json_object": True}}
    if asked is not None and asked.type == "json_schema":
        assert asked.json_schema is not None
        return {"response_format": {"json": asked.json_schema.json_schema}}
    return {}


def to_structured_outputs(body: SamplingBody, own: OwnConstraint) -> StructuredOutputsParams | None:
    """Return the constraint that a body asks for, in whichever way; None if it asks for none.

    Args:
        own: The same in the API's own way.

    Raises:
        InvalidRequestError: It asks for several.
    """
    asked = _asked(body, own)
    if len(asked) > 1:
        raise InvalidRequestError(
            f"{' and '.join(asked)} both say what the answer has to look like; give one of them.",
            field=list(asked)[1],
        )
    for values in asked.values():
        return StructuredOutputsParams(**values)
    return None


def constraint_field(body: SamplingBody, own: OwnConstraint) -> str:
    """Return the field that the constraint came in, for errors."""
    return next(iter(_asked(body, own)), "structured_outputs")


async def check_grammars(
    checker: GrammarChecker,
    requests: Sequence[EngineCoreRequest],
    field: str = "structured_outputs",
) -> list[EngineCoreRequest]:
    """Try out the constraint of requests that have one, so that the engine meets no bad one.

    Args:
        checker: Compiles where it can hurt nobody.
        requests: The choices of one request, all under the same constraint.
        field: What the request calls the constraint.

    Returns:
        The requests, with the constraint in its prepared form.

    Raises:
        InvalidRequestError: The constraint can't be served.
        QueueFullError: Too many others are being tried out.
    """
    params = requests[0].sampling_params.structured_outputs
    if params is None:
        return list(requests)
    prepared = await checker.check(params, field)
    return [
        msgspec.structs.replace(
            request,
            sampling_params=msgspec.structs.replace(
                request.sampling_params, structured_outputs=prepared
            ),
        )
        for request in requests
    ]


def _asked(body: SamplingBody, own: OwnConstraint) -> dict[str, Mapping[str, Any]]:
    """Return the fields that ask for something, with the parameters that they mean."""
    asked = dict(own)
    if body.structured_outputs is not None:
        given = body.structured_outputs
        values = {
            "json": given.json_schema,
            "json_object": given.json_object,
            "regex": given.regex,
            "choice": given.choice,
            "grammar": given.grammar,
        }
        asked["structured_outputs"] = _given(values)
    for name in _GUIDED:
        value = getattr(body, f"guided_{name}")
        if value not in (None, False):
            asked[f"guided_{name}"] = _given({name: value})
    return asked


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value not in (None, False)
    }
