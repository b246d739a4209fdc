"""TLS for the HTTP server: checked before anything is loaded, and renewed without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

from octavo_core.config import AccessConfig
from octavo_core.errors import ConfigError

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 10.0


def make_ssl_context(access: AccessConfig) -> ssl.SSLContext | None:
    """Return what https needs, or None if no certificate was given.

    Raises:
        ConfigError: A file is missing or wrong, or one of key and certificate was not given.
    """
    if access.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(access, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs --ssl-certfile, too.", field="ssl_certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, access)
    if access.ssl_ca_certs is not None:
        _guard("ssl_ca_certs", access.ssl_ca_certs, context.load_verify_locations)
    elif access.ssl_cert_reqs:
        raise ConfigError(
            f"--ssl-cert-reqs {access.ssl_cert_reqs} needs --ssl-ca-certs: certificates of "
            f"clients are checked against it.",
            field="ssl_ca_certs",
        )
    context.verify_mode = ssl.VerifyMode(access.ssl_cert_reqs)
    if access.ssl_ciphers is not None:
        _guard("ssl_ciphers", access.ssl_ciphers, context.set_ciphers)
    return context


async def refresh_certificate(context: ssl.SSLContext, access: AccessConfig) -> None:
    """Read key and certificate again whenever their files change, for connections from then on."""
    known = _modified(access)
    while True:
        await asyncio.sleep(_REFRESH_SECONDS)
        if _modified(access) == known:
            continue
        known = _modified(access)
        try:
            _load_certificate(context, access)
        except ConfigError as error:
            logger.error("The certificate stays as it was: %s", error)
        else:
            logger.info("Read the changed certificate %s", access.ssl_certfile)


def _load_certificate(context: ssl.SSLContext, access: AccessConfig) -> None:
    certfile, keyfile = access.ssl_certfile, access.ssl_keyfile
    assert certfile is not None

    def refuse_password() -> str:
        # Otherwise OpenSSL would ask for it on the terminal, and wait.
        raise ValueError("the key is encrypted; decrypt it with `openssl pkey`")

    def load(path: str) -> None:
        context.load_cert_chain(path, keyfile, refuse_password)

    if keyfile is not None:
        _guard("ssl_keyfile", keyfile, lambda path: Path(path).open("rb").close())
    _guard("ssl_certfile", certfile, load)


def _guard(field: str, value: str, use: Callable[[str], object]) -> None:
    """Call ``use(value)`` and turn what goes wrong into an error that names the flag."""
    flag = "--" + field.replace("_", "-")
    try:
        use(value)
    except ssl.SSLError as error:
        reason = (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
        raise ConfigError(f"{flag} {value}: {reason}.", field=field) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise ConfigError(f"{flag} {value}: {reason}.", field=field) from None
    except ValueError as error:
        raise ConfigError(f"{flag} {value}: {error}.", field=field) from None


def _modified(access: AccessConfig) -> tuple[int, ...]:
    times = []
    for path in (access.ssl_certfile, access.ssl_keyfile):
        try:
            times.append(os.stat(path).st_mtime_ns if path else 0)
        except OSError:
            times.append(0)
    return tuple(times)
