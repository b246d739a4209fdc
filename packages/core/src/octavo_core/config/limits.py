"""Settings: what one client may ask of the HTTP front."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from octavo_core.config.field_types import BYTES


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may ask of the HTTP front."""

    max_request_body_size: Annotated[
        int,
        Meta(ge=1024, le=1 << 30, description="Most bytes of a request's body.", extra=BYTES),
    ] = 16 << 20
    max_request_header_size: Annotated[
        int,
        Meta(ge=1024, le=1 << 24, description="Most bytes of a request's header.", extra=BYTES),
    ] = 64 << 10
    max_request_headers: Annotated[
        int, Meta(ge=16, le=65536, description="Most lines of a request's header.")
    ] = 256
    request_header_timeout: Annotated[
        float, Meta(ge=0, description="Seconds for a header, from its first byte; 0 is no limit.")
    ] = 15.0
    request_body_timeout: Annotated[
        float, Meta(ge=0, description="Seconds for a body, from its header; 0 is no limit.")
    ] = 120.0
    keep_alive_timeout: Annotated[
        int,
        Meta(
            ge=1,
            description="Seconds that a connection may wait for its next request. Clients' own "
            "limit should be lower, so that they never send on one that is closing here.",
        ),
    ] = 75
    max_connections: Annotated[
        int,
        Meta(ge=1, description="Most connections at once; beyond, the longest idle one is closed."),
    ] = 16384
