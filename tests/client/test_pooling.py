"""Embeddings, scores and ranks: what the client sends, and what it makes of the answer."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest

from octavo_client import AsyncClient, Client, InvalidArgumentError
from support.scripted_server import Reply, ScriptedServer

VECTOR = [0.5, -1.0, 2.0]
ENCODED = base64.b64encode(struct.pack("<3f", *VECTOR)).decode()
USAGE = {"prompt_tokens": 3, "total_tokens": 3}
ANSWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # method: path, arguments, body, answer
    "embeddings": (
        "/v1/embeddings",
        {"input": ["a", "b"], "model": "m", "dimensions": 3},
        {"input": ["a", "b"], "model": "m", "dimensions": 3, "encoding_format": "base64"},
        {"data": [{"index": 0, "embedding": ENCODED}, {"index": 1, "embedding": VECTOR}]},
    ),
    "score": (
        "/v1/score",
        {"text_1": "a", "text_2": ["b"], "extra_body": {"priority": 1}},
        {"text_1": "a", "text_2": ["b"], "priority": 1},
        {"data": [{"index": 0, "score": 0.25}]},
    ),
    "rerank": (
        "/v1/rerank",
        {"query": "a", "documents": ["b", "c"], "top_n": 1},
        {"query": "a", "documents": ["b", "c"], "top_n": 1},
        {"results": [{"index": 1, "relevance_score": 0.75, "document": {"text": "c"}}]},
    ),
}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("method", ANSWERS)
def test_both_clients_send_and_read(
    server: ScriptedServer, reply: type[Reply], method: str, kind: Any
) -> None:
    path, arguments, body, answer = ANSWERS[method]
    server.replies.append(reply.json({**answer, "usage": USAGE}))
    client = kind(server.url)
    result = getattr(client, method)(**arguments)
    if kind is AsyncClient:
        result = asyncio.run(_awaited(result))
    (request,) = server.received
    assert (request.path, request.body) == (path, body)
    assert result.usage.total_tokens == 3
    if method == "embeddings":
        assert result.vectors == [VECTOR, VECTOR]
    elif method == "score":
        assert [item.score for item in result.data] == [0.25]
    else:
        assert result.results[0].document.text == "c"


async def _awaited(call: Any) -> Any:
    return await call


def test_what_json_can_not_carry_is_refused() -> None:
    with Client() as client, pytest.raises(InvalidArgumentError, match="nan"):
        client.score("a", "b", extra_body={"x": float("nan")})
