"""From the bytes of a request to its checked fields."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from octavo_core.errors import InvalidRequestError
from octavo_server.api.context import context_of
from octavo_server.api.deadline import note_timeout
from octavo_server.api.errors import ApiError
from octavo_server.api.gate import unless_draining
from octavo_server.api.request_id import note_request_id

logger = logging.getLogger(__name__)

MAX_DEPTH = 100

# A larger body is parsed in a thread, so that it doesn't hold up the streams.
_INLINE_BYTES = 64 * 1024
# A body over the limit is read and dropped up to here, since a client that is still
# sending does not see the answer.
_MAX_DISCARDED = 4
_MAX_SHOWN_VALUE = 80

_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_FIELD = re.compile(r"<[a-z_ ]+>|\[key\]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

Model = TypeVar("Model", bound=BaseModel)


async def parse_body(request: Request, model: type[Model]) -> Model:
    """Read, decode and check a JSON body.

    Raises:
        ApiError: The body is too large, compressed or not declared as JSON, or the server is
            shutting down.
        InvalidRequestError: It is not JSON, or a field is wrong.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # A web page can send any other type to a local server without the browser asking.
        raise ApiError(400, "the body must be sent with Content-Type: application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"the body has Content-Encoding {encoding!r}; send it uncompressed")
    # A client may never send the rest.
    body = await unless_draining(context_of(request), _read_body(request))
    # Another front may have to answer this request.
    request.state.raw_body = body
    if len(body) <= _INLINE_BYTES:
        checked = _validate(decode_json(body), model)
    else:
        checked = await asyncio.to_thread(lambda: _validate(decode_json(body), model))
    note_timeout(request, checked)
    note_request_id(request, checked)
    return checked


def decode_json(data: bytes) -> Any:
    """Decode JSON, strictly: no NaN, no lone surrogates, no nesting deeper than 100.

    Raises:
        InvalidRequestError: It is none, or is nested too deep.
    """
    if _is_deeper_than(data, MAX_DEPTH):
        raise InvalidRequestError(
            f"the JSON is nested deeper than {MAX_DEPTH} levels", code="too_deep"
        )
    try:
        return msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        reason = _lone_surrogate(data) or str(error)
        raise InvalidRequestError(f"the body is not valid JSON: {reason}") from None


def _lone_surrogate(data: bytes) -> str | None:
    """Return what is wrong if `data` is JSON but for half a surrogate pair.

    msgspec refuses it as well, with a message about truncated data.
    """
    try:
        json.dumps(json.loads(data), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        return (
            f"a string has the lone surrogate \\u{code:04x}, half of a character; send both halves"
        )
    except ValueError:
        pass
    return None


async def _read_body(request: Request) -> bytes:
    limit = context_of(request).config.limits.max_request_body_size
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        elif size > _MAX_DISCARDED * limit:
            break
    if size > limit:
        raise ApiError(
            413,
            f"the body is larger than {limit} bytes (--max-request-body-size)",
            code="request_too_large",
        )
    return b"".join(chunks)


def _is_deeper_than(data: bytes, limit: int) -> bool:
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    brackets = _STRINGS.sub(b"", data).translate(None, _NOT_BRACKETS)
    return any(depth > limit for depth in accumulate(map(_STEPS.__getitem__, brackets)))


def _validate(content: Any, model: type[Model]) -> Model:
    if not isinstance(content, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if logger.isEnabledFor(logging.DEBUG):
        unknown = content.keys() - model.model_fields.keys()
        if unknown:
            logger.debug("Ignoring unknown fields: %s", ", ".join(sorted(unknown)))
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> InvalidRequestError:
    """Tell the first problem: its field, its value and what is wanted."""
    problem = error.errors(include_url=False, include_context=True)[0]
    own = (problem.get("ctx") or {}).get("error")
    if isinstance(own, InvalidRequestError):
        return own
    path = _path(problem["loc"])
    field = _format_path(path)
    message = problem["msg"]
    message = message[:1].lower() + message[1:]
    if problem["type"] == "missing":
        return InvalidRequestError(f"{field} is missing", field=field)
    shown = repr(_beginning(problem["input"]))
    if len(shown) > _MAX_SHOWN_VALUE:
        shown = shown[:_MAX_SHOWN_VALUE] + "…"
    prefix = f"{field} is {shown}: " if field else ""
    return InvalidRequestError(f"{prefix}{message}", field=field or None)


def _beginning(value: Any, num_chars: int = _MAX_SHOWN_VALUE + 1) -> Any:
    """Return a value whose `repr` begins like that of `value`, for so many characters.

    That of 16 MiB takes a second, in which the interpreter does nothing else.
    """
    if isinstance(value, str):
        return value[:num_chars]
    if not isinstance(value, list | dict):
        return value
    kept: list[tuple[Any, Any]] = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if num_chars <= 0:
            break
        # An index is not shown; what is left may be too much, never too little.
        kept.append((_beginning(key, num_chars), _beginning(item, num_chars)))
        num_chars -= len(repr(kept[-1][1]))
    return dict(kept) if isinstance(value, dict) else [item for _, item in kept]


def _path(location: tuple[int | str, ...]) -> list[int | str]:
    """Drop the names of union branches and of keys, which are no fields of the request."""
    return [part for part in location if isinstance(part, int) or not _NO_FIELD.fullmatch(part)]


def _format_path(path: list[int | str]) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
