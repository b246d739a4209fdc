"""``/v1/responses``: OpenAI's Responses API, with its store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_core.errors import InvalidRequestError
from octavo_core.wire import EngineCoreRequest
from octavo_server.api.answers import (
    DeletedResponse,
    ItemList,
    ResponseAnswer,
    ResponseTokenCount,
)
from octavo_server.api.body import parse_body
from octavo_server.api.context import LoadedModel, ServerContext, context_of
from octavo_server.api.conversation import PreparedConversation, prepare
from octavo_server.api.deadline import with_deadline
from octavo_server.api.errors import ApiError, json_response, to_api_error
from octavo_server.api.openapi import documented, query_parameter
from octavo_server.api.protocol import (
    MAX_NAME_CHARS,
)
from octavo_server.api.request_id import client_request_id
from octavo_server.api.respond import raise_errors, respond
from octavo_server.api.responses_input import (
    new_item_id,
    text_constraint,
    to_conversation,
    to_items,
)
from octavo_server.api.responses_output import ResponseWriter
from octavo_server.api.responses_protocol import ResponsesRequest
from octavo_server.api.responses_store import EventLog, Item, ResponseStore, StoredResponse
from octavo_server.api.sse import DONE, EventStream
from octavo_server.api.structured_outputs import check_grammars, constraint_field
from octavo_server.api.timing import timing_of
from octavo_server.generation import Generation

logger = logging.getLogger(__name__)

router = APIRouter()

_ONE = "/v1/responses/{response_id}"
_MAX_PAGE = 100
_DEFAULT_PAGE = 20


@router.post(
    "/v1/responses", **documented(body=ResponsesRequest, answer=ResponseAnswer, streams=True)
)
async def create_response(request: Request) -> Response:
    """Answer a conversation, and keep the answer."""
    body = await parse_body(request, ResponsesRequest)
    context = context_of(request)
    model = context.loaded_model()
    model.check_name(body.model)
    if body.previous_response_id is not None:
        raw_body = request.state.raw_body
        elsewhere = await _elsewhere(request, body.previous_response_id, raw_body)
        if elsewhere is not None:
            return elsewhere
    is_stored = _is_stored(body, context.responses)
    history = _history(body, context.responses)
    items = to_items(body)
    response_id = context.fronts.new_response_id()
    prepared = await asyncio.to_thread(_prepare, body, [*history, *items], model, response_id)
    field = prepared.constraint_field(constraint_field(body, text_constraint(body)))
    log = EventLog() if body.background else None
    writer = ResponseWriter(
        response_id,
        body,
        prepared,
        is_stored=is_stored,
        on_end=lambda: _keep(context.responses, response_id, stored) if is_stored else None,
        log=log,
    )
    stored = StoredResponse(writer.whole, items, history, log)
    if log is None:
        return await respond(
            request,
            response_id,
            prepared.requests,
            writer,
            stream=bool(body.stream),
            constraint_field=field,
            note_timing=writer.note_timing if body.include_timing else None,
        )
    requests = await check_grammars(context.grammar_checker, prepared.requests, field)
    requests = with_deadline(request, requests)
    generation = _start_in_background(
        context, response_id, requests, writer, stored, includes_timing=bool(body.include_timing)
    )
    generation.client_request_id = client_request_id(request)
    shown_id = generation.client_request_id or response_id
    if body.stream:
        return _event_stream(log, 0, shown_id)
    return json_response(writer.whole(), headers={"X-Request-Id": shown_id})


@router.post(
    "/v1/responses/input_tokens",
    **documented(body=ResponsesRequest, answer=ResponseTokenCount),
)
async def count_input_tokens(request: Request) -> Response:
    """Tell how many tokens a prompt has."""
    body = await parse_body(request, ResponsesRequest)
    context = context_of(request)
    model = context.loaded_model()
    model.check_name(body.model)
    if body.previous_response_id is not None:
        raw_body = request.state.raw_body
        elsewhere = await _elsewhere(request, body.previous_response_id, raw_body)
        if elsewhere is not None:
            return elsewhere
    items = [*_history(body, context.responses), *to_items(body)]
    prepared = await asyncio.to_thread(_prepare, body, items, model, new_item_id("count"))
    return json_response(
        {"object": "response.input_tokens", "input_tokens": prepared.num_prompt_tokens}
    )


@router.get(
    _ONE,
    **documented(
        answer=ResponseAnswer,
        streams=True,
        parameters=[
            query_parameter("stream", {"type": "boolean"}),
            query_parameter("starting_after", {"type": "integer", "minimum": -1}),
        ],
    ),
)
async def get_response(request: Request, response_id: str) -> Response:
    """Return a response, or follow the events of one that is computed in the background."""
    elsewhere = await _elsewhere(request, response_id)
    if elsewhere is not None:
        return elsewhere
    stored = _stored(request, response_id)
    if request.query_params.get("stream") not in ("true", "1"):
        return json_response(stored.read())
    if stored.log is None:
        raise InvalidRequestError(
            "stream is true, but only a response with background true can be followed.",
            field="stream",
        )
    after = _integer(request, "starting_after", -1, -1, 2**31)
    return _event_stream(stored.log, after + 1, response_id)


@router.delete(_ONE, **documented(answer=DeletedResponse))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response, and end its computation."""
    elsewhere = await _elsewhere(request, response_id)
    if elsewhere is not None:
        return elsewhere
    stored = _stored(request, response_id)
    if stored.cancel is not None:
        stored.cancel()
    context_of(request).responses.remove(response_id)
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


@router.post(f"{_ONE}/cancel", **documented(answer=ResponseAnswer))
async def cancel_response(request: Request, response_id: str) -> Response:
    """End the computation of a response in the background."""
    elsewhere = await _elsewhere(request, response_id)
    if elsewhere is not None:
        return elsewhere
    stored = _stored(request, response_id)
    if stored.log is None:
        raise InvalidRequestError(
            "only a response with background true can be cancelled; to end another one, close "
            "its connection.",
            field="response_id",
        )
    if stored.cancel is not None:
        stored.cancel()
        assert stored.task is not None
        await asyncio.wait({stored.task})
    return json_response(stored.read())


@router.get(
    f"{_ONE}/input_items",
    **documented(
        answer=ItemList,
        parameters=[
            query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE}),
            query_parameter("order", {"type": "string", "enum": ["asc", "desc"]}),
            query_parameter("after", {"type": "string", "maxLength": MAX_NAME_CHARS}),
        ],
    ),
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """List what a response was the answer to, the latest first unless asked otherwise."""
    elsewhere = await _elsewhere(request, response_id)
    if elsewhere is not None:
        return elsewhere
    stored = _stored(request, response_id)
    items = [*stored.history, *stored.input_items]
    if request.query_params.get("order", "desc") != "asc":
        items.reverse()
    after = request.query_params.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequestError(f"after is {after!r}, which is no item here.", field="after")
        items = items[ids.index(after) + 1 :]
    limit = _integer(request, "limit", _DEFAULT_PAGE, 1, _MAX_PAGE)
    page = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


def _is_stored(body: ResponsesRequest, store: ResponseStore) -> bool:
    is_stored = body.store is not False and store.max_responses > 0
    if body.background and not is_stored:
        raise InvalidRequestError(
            "background is true, which needs store to be true, and a server that stores "
            "(--max-stored-responses is above 0).",
            field="background",
        )
    return is_stored


def _history(body: ResponsesRequest, store: ResponseStore) -> list[Item]:
    if body.previous_response_id is None:
        return []
    stored = store.get(body.previous_response_id)
    if stored is None:
        raise InvalidRequestError(
            f"previous_response_id is {body.previous_response_id!r}, which is not stored here: it "
            f"was asked for with store false, has been deleted, or is older than the latest "
            f"{store.max_responses} responses (--max-stored-responses).",
            field="previous_response_id",
            code="previous_response_not_found",
        )
    if stored.cancel is not None:
        raise InvalidRequestError(
            "previous_response_id is a response that is not complete yet.",
            field="previous_response_id",
        )
    return stored.conversation()


def _prepare(
    body: ResponsesRequest, items: list[Item], model: LoadedModel, response_id: str
) -> PreparedConversation:
    return prepare(model, response_id, to_conversation(body, items, model))


def _keep(store: ResponseStore, response_id: str, stored: StoredResponse) -> None:
    """Keep a response that has ended, unless it was deleted meanwhile."""
    if stored.log is not None and store.get(response_id) is None:
        return
    stored.cancel = None
    response = stored.read()
    # The answer alone is kept, and not what it was made from.
    stored.read = lambda: response
    store.put(response_id, stored)


def _start_in_background(
    context: ServerContext,
    response_id: str,
    requests: Sequence[EngineCoreRequest],
    writer: ResponseWriter,
    stored: StoredResponse,
    *,
    includes_timing: bool,
) -> Generation:
    generation = context.client.generate(response_id, requests)
    stored.cancel = generation.close
    stored.task = asyncio.create_task(_run(generation, writer, includes_timing=includes_timing))
    stored.task.add_done_callback(partial(_on_done, stored))
    context.responses.put(response_id, stored)
    return generation


async def _run(generation: Generation, writer: ResponseWriter, *, includes_timing: bool) -> None:
    try:
        writer.begin()
        async for deltas in generation:
            raise_errors(deltas)
            await writer.step(deltas)
        if includes_timing:
            writer.note_timing(timing_of(generation.progress))
        writer.end()
    except Exception as error:
        writer.fail(to_api_error(error))
    finally:
        generation.close()


def _on_done(stored: StoredResponse, task: asyncio.Task[None]) -> None:
    stored.cancel = None
    if stored.log is not None:
        stored.log.end()
    if not task.cancelled() and task.exception() is not None:
        logger.error("A response in the background failed", exc_info=task.exception())


async def _followed(log: EventLog, start: int) -> AsyncGenerator[bytes, None]:
    """Yield what `log` has from event `start` on; what is over says so, if there is nothing."""
    is_empty = True
    async for data in log.follow(start):
        is_empty = False
        yield data
    if is_empty:
        yield DONE


def _event_stream(log: EventLog, start: int, request_id: str) -> EventStream:
    events = _followed(log, start)
    # Who stops to read does not end the computation: that is what the background is for.
    return EventStream(events, lambda: None, {"X-Request-Id": request_id})


async def _elsewhere(request: Request, response_id: str, body: bytes = b"") -> Response | None:
    """Return the answer of the front that has a response, if it is another one than this."""
    context = context_of(request)
    if context.responses.get(response_id) is not None:
        return None
    return await context.fronts.forward(request, response_id, body)


def _stored(request: Request, response_id: str) -> StoredResponse:
    store = context_of(request).responses
    stored = store.get(response_id)
    if stored is None:
        raise ApiError(
            404,
            f"there is no response {response_id!r} here: it was not stored, has been deleted, or "
            f"is older than the latest {store.max_responses} (--max-stored-responses)",
            param="response_id",
            code="response_not_found",
        )
    return stored


def _integer(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    value: Any = int(text) if text.removeprefix("-").isdecimal() and len(text) < 12 else None
    if value is None or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} is {text!r}; it must be an integer from {low} to {high}.", field=name
        )
    return int(value)
