"""Typed client for OpenAI-compatible servers.

from octavo_client import Client

with Client("http://127.0.0.1:8000") as client:
    print(client.chat([{"role": "user", "content": "Hello"}]).text)
"""

from octavo_client.async_client import AsyncClient
from octavo_client.client import Client
from octavo_client.errors import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ClosedError,
    InvalidArgumentError,
    InvalidResponseError,
    NotFoundError,
    OctavoClientError,
    RateLimitError,
    ServerError,
    StreamError,
)
from octavo_client.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Embeddings,
    Health,
    Model,
    Ranking,
    Scores,
    Usage,
)
from octavo_client.stream import AsyncStream, Stream

__version__ = "0.1.0"

__all__ = [
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationError",
    "BadRequestError",
    "ChatCompletion",
    "ChatCompletionChunk",
    "Client",
    "ClosedError",
    "Completion",
    "Embeddings",
    "Health",
    "InvalidArgumentError",
    "InvalidResponseError",
    "Model",
    "NotFoundError",
    "OctavoClientError",
    "Ranking",
    "RateLimitError",
    "Scores",
    "ServerError",
    "Stream",
    "StreamError",
    "Usage",
]
