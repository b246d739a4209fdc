"""Settings: who may use the HTTP API, and how it is encrypted."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo_core.config.field_types import SECRET, VISIBLE_ASCII, Texts


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who may use the HTTP API, and how it is encrypted."""

    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1, pattern=VISIBLE_ASCII)], ...],
        Meta(
            description="Key that clients must send, as Authorization: Bearer or X-Api-Key; may be "
            "given several times. Other users of this machine can read a flag: the variable and "
            "--api-key-file are safer.",
            extra=SECRET,
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(description="File with one key a line, beside those of --api-key; read on change."),
    ] = None
    allowed_origins: Annotated[
        Texts,
        Meta(description="Origin of web pages that may call (CORS), or *; may be repeated."),
    ] = ()
    allowed_methods: Annotated[
        Texts, Meta(description="HTTP methods that such pages may use; may be repeated.")
    ] = ("*",)
    allowed_headers: Annotated[
        Texts, Meta(description="Headers that such pages may send; may be repeated.")
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Meta(description="Let such pages send cookies and client certificates.")
    ] = False
    ssl_keyfile: Annotated[
        str | None, Meta(description="Private key of the server, PEM, for https.")
    ] = None
    ssl_certfile: Annotated[
        str | None, Meta(description="Certificate of the server and its chain, PEM, for https.")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="Certificates of authorities that clients' must come from.")
    ] = None
    ssl_cert_reqs: Annotated[
        Literal[0, 1, 2],
        Meta(description="Certificate of a client: 0 not asked for, 1 optional, 2 required."),
    ] = 0
    ssl_ciphers: Annotated[
        str | None, Meta(description="Ciphers for TLS 1.2, in OpenSSL's notation.")
    ] = None
    enable_ssl_refresh: Annotated[
        bool, Meta(description="Read key and certificate again when their files change.")
    ] = False
    enable_operator_routes: Annotated[
        bool,
        Meta(
            description="Serve the routes that act on the whole server, such as "
            "/reset_prefix_cache and /sleep."
        ),
    ] = False
