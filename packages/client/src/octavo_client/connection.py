"""How a client reaches its server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import httpx

from octavo_client.errors import InvalidArgumentError
from octavo_client.requests import HTTPRequest
from octavo_client.retry import RetryPolicy

# Shorter than servers keep an idle connection (uvicorn: 5 s), so that a request never
# goes out on a connection that the server is just closing.
_KEEPALIVE_SECONDS = 2.0


@dataclass(frozen=True, repr=False)
class ClientSettings:
    """What both clients are told; see `Client`.

    Raises:
        InvalidArgumentError: A value can't work.
    """

    base_url: str
    api_key: str | None
    timeout: float
    connect_timeout: float
    max_retries: int

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidArgumentError(f"base_url {self.base_url!r} is no URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidArgumentError(
                f"base_url {self.base_url!r} must start with http:// or https://"
            )
        if self.max_retries < 0:
            raise InvalidArgumentError(f"max_retries is {self.max_retries}; it must be 0 or more")
        if self.api_key is not None and not _is_token(self.api_key):
            # The key itself is a secret, so it is not in the message.
            raise InvalidArgumentError(
                "api_key can't be sent in a header: it must be printable ASCII without spaces, "
                "and not empty"
            )

    @property
    def retry(self) -> RetryPolicy:
        """When to try again."""
        return RetryPolicy(max_retries=self.max_retries)

    def http_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `httpx.Client` and `httpx.AsyncClient`."""
        root = self.base_url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return {
            "base_url": root,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, connect=self.connect_timeout),
            # No bound on connections: the server queues, and a waiting thread or task is cheap.
            "limits": httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS),
            # A proxy of the environment can't reach this machine's own loopback.
            "trust_env": not _is_loopback(httpx.URL(root).host),
        }

    def request_arguments(self, request: HTTPRequest) -> dict[str, Any]:
        """Return the keyword arguments of ``build_request``."""
        arguments: dict[str, Any] = {
            "method": request.method,
            "url": request.path,
            "content": request.content,
        }
        if request.timeout is not None:
            arguments["timeout"] = httpx.Timeout(
                request.timeout, connect=min(self.connect_timeout, request.timeout)
            )
        return arguments


def _is_token(text: str) -> bool:
    return bool(text) and all("!" <= character <= "~" for character in text)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
