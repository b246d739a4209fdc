"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``: Anthropic's API."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.answers import MessageAnswer, TokenCount
from octavo_server.api.anthropic_input import output_constraint, to_conversation
from octavo_server.api.anthropic_output import MessageWriter
from octavo_server.api.anthropic_protocol import CountTokensRequest, MessagesRequest
from octavo_server.api.body import parse_body
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.conversation import PreparedConversation, prepare
from octavo_server.api.errors import json_response
from octavo_server.api.generation import new_request_id
from octavo_server.api.openapi import documented
from octavo_server.api.respond import respond
from octavo_server.api.structured_outputs import constraint_field

router = APIRouter()


@router.post("/v1/messages", **documented(body=MessagesRequest, answer=MessageAnswer, streams=True))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    body = await parse_body(request, MessagesRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    message_id = new_request_id("msg")
    prepared = await asyncio.to_thread(_prepare, body, model, message_id)
    writer = MessageWriter(message_id, prepared, body.max_tokens)
    return await respond(
        request,
        message_id,
        prepared.requests,
        writer,
        stream=bool(body.stream),
        constraint_field=prepared.constraint_field(constraint_field(body, output_constraint(body))),
        note_timing=writer.note_timing if body.include_timing else None,
    )


@router.post("/v1/messages/count_tokens", **documented(body=CountTokensRequest, answer=TokenCount))
async def count_tokens(request: Request) -> Response:
    """Tell how many tokens a prompt has."""
    body = await parse_body(request, CountTokensRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    prepared = await asyncio.to_thread(_prepare, body, model, new_request_id("count"))
    return json_response({"input_tokens": prepared.num_prompt_tokens})


def _prepare(body: CountTokensRequest, model: LoadedModel, request_id: str) -> PreparedConversation:
    return prepare(model, request_id, to_conversation(body, model))
