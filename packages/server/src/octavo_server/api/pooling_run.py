"""Runs the texts of one API request through the engine, and gives back their vectors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo_core.errors import RequestFailedError
from octavo_core.pooling_params import PooledOutput
from octavo_core.wire import EngineCoreRequest
from octavo_server.api.context import LoadedModel, context_of
from octavo_server.api.deadline import with_deadline
from octavo_server.api.errors import json_response
from octavo_server.api.request_id import client_request_id
from octavo_server.api.respond import raise_errors
from octavo_server.api.sse import until_disconnect
from octavo_server.api.timing import timing_of
from octavo_server.generation import Generation


@dataclass
class PooledTexts:
    """What the engine made of the texts of a request.

    Attributes:
        outputs: One for each text, in their order.
        num_tokens: Of all texts.
        num_cached_tokens: Of them, those whose K and V were there.
    """

    outputs: list[PooledOutput]
    num_tokens: int
    num_cached_tokens: int

    def usage(self) -> dict[str, Any]:
        """Return the counts in OpenAI's shape."""
        return {
            "prompt_tokens": self.num_tokens,
            "total_tokens": self.num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


async def answer_pooled(
    request: Request,
    request_id: str,
    requests: Sequence[EngineCoreRequest],
    write: Callable[[PooledTexts], dict[str, Any]],
) -> Response:
    """Run texts and answer with what `write` makes of their vectors.

    Args:
        request_id: The answer's id.
        requests: One for each text.
        write: Returns the answer's body; called in a thread, for it may take a while.

    Raises:
        OctavoError: The engine refused one of the texts, or failed.
        ClientDisconnect: The client left; the engine's work was aborted.
    """
    client = context_of(request).client
    generation = client.generate(request_id, with_deadline(request, requests))
    generation.client_request_id = client_request_id(request)
    try:
        outputs = await until_disconnect(request.receive, _collect(generation, len(requests)))
    except BaseException:
        generation.close()
        raise
    timing = timing_of(generation.progress)
    pooled = PooledTexts(
        outputs,
        sum(len(each.prompt_token_ids) for each in requests),
        timing.num_cached_tokens,
    )
    headers = {"X-Request-Id": client_request_id(request) or request_id, **timing.headers()}
    return await asyncio.to_thread(lambda: json_response(write(pooled), headers=headers))


def answer_head(request_id: str, model: LoadedModel, kind: str = "list") -> dict[str, Any]:
    """Return the fields that most of these answers begin with."""
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model.name}


async def _collect(generation: Generation, num_texts: int) -> list[PooledOutput]:
    found: dict[int, PooledOutput] = {}
    async for deltas in generation:
        raise_errors(deltas)
        for delta in deltas:
            if delta.pooled is None:
                raise RequestFailedError("the request was ended before its texts were pooled")
            found[delta.index] = delta.pooled
    return [found[index] for index in range(num_texts)]
