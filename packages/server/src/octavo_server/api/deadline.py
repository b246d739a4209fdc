"""How long a client is willing to wait: the header ``X-Request-Timeout`` or the field ``timeout``.

The engine ends a request whose time is over wherever it is, in line or running (504).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from octavo_core.errors import InvalidRequestError
from octavo_core.wire import EngineCoreRequest
from octavo_server.api.context import context_of
from octavo_server.api.protocol import MAX_TIMEOUT
from octavo_server.engine_client import Generation

HEADER = "X-Request-Timeout"


def note_timeout(request: Request, body: object) -> None:
    """Remember the ``timeout`` of a body that has one, for `generate`."""
    request.state.timeout = getattr(body, "timeout", None)


def generate(
    request: Request, request_id: str, requests: Sequence[EngineCoreRequest]
) -> Generation:
    """Hand the choices of one request to the engine, with the time that they have.

    Raises:
        InvalidRequestError: The header holds no number of seconds.
        OctavoError: As `EngineClient.generate`.
    """
    timeouts = [_header_timeout(request), getattr(request.state, "timeout", None)]
    given = [timeout for timeout in timeouts if timeout is not None]
    if given:
        requests = [_with_deadline(choice, min(given)) for choice in requests]
    return context_of(request).client.generate(request_id, requests)


def _header_timeout(request: Request) -> float | None:
    text = request.headers.get(HEADER)
    if text is None:
        return None
    try:
        timeout = float(text)
    except ValueError:
        timeout = math.nan
    if not 0 < timeout <= MAX_TIMEOUT:
        raise InvalidRequestError(
            f"the header {HEADER} is {text[:80]!r}; it must be a number of seconds above 0 and at "
            f"most {MAX_TIMEOUT}.",
            field=HEADER,
        )
    return timeout


def _with_deadline(request: EngineCoreRequest, timeout: float) -> EngineCoreRequest:
    return msgspec.structs.replace(request, deadline=request.arrival_time + timeout)
