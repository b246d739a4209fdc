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
from octavo_server.api.protocol import (
    MAX_TIMEOUT,
)

HEADER = "X-Request-Timeout"


def note_timeout(request: Request, body: object) -> None:
    """Remember the ``timeout`` of a body that has one, for `with_deadline`."""
    request.state.timeout = getattr(body, "timeout", None)


def with_deadline(
    request: Request, choices: Sequence[EngineCoreRequest]
) -> list[EngineCoreRequest]:
    """Return the choices of one request with the time that they have, if it says any.

    Raises:
        InvalidRequestError: The header holds no number of seconds.
    """
    timeouts = [_header_timeout(request), getattr(request.state, "timeout", None)]
    given = [timeout for timeout in timeouts if timeout is not None]
    if not given:
        return list(choices)
    return [
        msgspec.structs.replace(choice, deadline=choice.arrival_time + min(given))
        for choice in choices
    ]


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
