"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo_core.sampling_params import SamplingParams
from octavo_server.api.answers import DetokenizeAnswer, TokenizeAnswer
from octavo_server.api.body import parse_body
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.conversation import Conversation, prompt_token_ids
from octavo_server.api.errors import json_response
from octavo_server.api.messages import to_template_messages
from octavo_server.api.openapi import documented
from octavo_server.api.tokenize_protocol import (
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo_server.api.tool_use import ToolUse

router = APIRouter()


@router.post("/tokenize", **documented(body=TokenizeRequest, answer=TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    """Return the tokens of a prompt or of a conversation."""
    body = await parse_body(request, TokenizeRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    # A long prompt takes long enough to be felt by every stream.
    return json_response(await asyncio.to_thread(_tokenize, body, model))


@router.post("/detokenize", **documented(body=DetokenizeRequest, answer=DetokenizeAnswer))
async def detokenize(request: Request) -> Response:
    """Return the text of tokens, control tokens included."""
    body = await parse_body(request, DetokenizeRequest)
    model = context_of(request).loaded_model()
    model.check_name(body.model)
    model.input_processor.check_token_ids(body.tokens, "tokens")
    text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


def _tokenize(body: TokenizeRequest, model: LoadedModel) -> dict[str, Any]:
    token_ids = _token_ids(body, model)
    pieces = [model.tokenizer.piece(i) for i in token_ids] if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
        "token_strs": pieces,
    }


def _token_ids(body: TokenizeRequest, model: LoadedModel) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None
        return model.input_processor.encode_prompt(
            body.prompt, body.add_special_tokens is not False
        )
    messages = to_template_messages(body.messages)
    goes_on = bool(body.continue_final_message)
    conversation = Conversation(
        messages=messages[:-1] if goes_on else messages,
        params=SamplingParams(),
        tool_use=ToolUse.of([tool.function for tool in body.tools or ()], None, True),
        template_options=body.chat_template_kwargs or {},
        add_generation_prompt=goes_on or body.add_generation_prompt is not False,
        prefill=messages[-1]["content"] if goes_on else None,
    )
    return prompt_token_ids(model, conversation)
