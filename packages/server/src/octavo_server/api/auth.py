"""API keys: on every route, known or not, but the two that tell whether the server is up."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.api.errors import ApiError
from octavo_server.keys import KeyRing

# Load balancers and service managers have no key. Compared with the path as it was sent, before
# any decoding, so that no other spelling passes.
OPEN_PATHS = frozenset({b"/health", b"/ready"})
OPEN_METHODS = frozenset({"GET", "HEAD"})

_POLICY_VIOLATION = 1008


class KeyCheck:
    """ASGI middleware that answers 401 unless a request brings a key.

    It stands before the routing, so that no route can be forgotten and no spelling of a path
    gets around it.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan" or _is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _unauthorized()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    def _has_key(self, scope: Scope) -> bool:
        return any(self._keys.opens(key) for key in _presented_keys(scope))


def _is_open(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] in OPEN_METHODS
        and scope.get("raw_path") in OPEN_PATHS
    )


def _presented_keys(scope: Scope) -> list[bytes]:
    """Return the keys in Authorization and X-Api-Key; a header that comes twice counts as none."""
    found: dict[bytes, list[bytes]] = {b"authorization": [], b"x-api-key": []}
    for name, value in scope["headers"]:
        if name in found:
            found[name].append(value)
    keys = []
    match found[b"authorization"]:
        case [value]:
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
    match found[b"x-api-key"]:
        case [value]:
            keys.append(value.strip())
    return keys


def _unauthorized() -> _Unauthorized:
    return _Unauthorized(
        401,
        "this server needs an API key, and the request has none that it knows; send "
        "Authorization: Bearer KEY or X-Api-Key: KEY",
        code="invalid_api_key",
    )


class _Unauthorized(ApiError):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self.response(scope["path"])
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)
