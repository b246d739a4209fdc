"""The keys that open the server, from flags and from a file that may change."""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from octavo_core.config import AccessConfig
from octavo_core.errors import ConfigError

logger = logging.getLogger(__name__)

_VISIBLE_ASCII = re.compile(r"[!-~]+")
_RELOAD_SECONDS = 1.0
_MAX_FILE_BYTES = 1 << 20

Fingerprint = tuple[int, int, int]


def make_key_ring(access: AccessConfig) -> KeyRing | None:
    """Return the keys, or None if the server is open to anybody.

    Raises:
        ConfigError: The file of keys can't be read, or holds none.
    """
    if not access.api_key and access.api_key_file is None:
        return None
    return KeyRing(access.api_key, Path(access.api_key_file) if access.api_key_file else None)


class KeyRing:
    """The keys that open the server, from flags and from a file that may change.

    Only digests are kept, and all of them are compared with in the same time, so neither a
    memory dump nor a clock tells a key.

    Args:
        keys: From flags or the environment.
        path: File with one key a line; empty lines and those that begin with # do not count.

    Raises:
        ConfigError: The file can't be read, or holds no key.
    """

    def __init__(self, keys: Sequence[str], path: Path | None = None) -> None:
        self._fixed = [_digest(key.encode()) for key in keys]
        self._path = path
        self._from_file: list[bytes] = []
        self._fingerprint: Fingerprint | None = None
        self._next_look = 0.0
        if path is not None:
            self._fingerprint = _fingerprint(path)
            self._from_file = _read_keys(path)

    def opens(self, key: bytes) -> bool:
        """True if `key` is one of the keys, whatever the time that this takes says of others."""
        self._refresh()
        digest = _digest(key)
        found = False
        for known in (*self._fixed, *self._from_file):
            found |= hmac.compare_digest(digest, known)
        return found

    def _refresh(self) -> None:
        """Look at most once a second whether the file has changed.

        A file that is gone, empty or wrong leaves the keys as they are: an editor may be in
        the middle of writing it.
        """
        now = time.monotonic()
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + _RELOAD_SECONDS
        try:
            fingerprint = _fingerprint(self._path)
            if fingerprint == self._fingerprint:
                return
            self._fingerprint = fingerprint
            self._from_file = _read_keys(self._path)
        except ConfigError as error:
            if self._fingerprint is not None:
                logger.error("The keys stay as they were: %s", error)
            self._fingerprint = None
        else:
            logger.info("Read %d keys from --api-key-file", len(self._from_file))


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _fingerprint(path: Path) -> Fingerprint:
    try:
        status = path.stat()
    except OSError as error:
        raise _unusable(path, os.strerror(error.errno or 0).lower()) from None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read_keys(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unusable(path, os.strerror(error.errno or 0).lower()) from None
    if len(data) > _MAX_FILE_BYTES:
        raise _unusable(path, f"it is larger than {_MAX_FILE_BYTES} bytes")
    keys = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _VISIBLE_ASCII.fullmatch(key):
            raise _unusable(path, f"line {number} is no key of visible ASCII characters")
        keys.append(_digest(key.encode()))
    if not keys:
        raise _unusable(path, "it holds no key")
    return keys


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"--api-key-file {path}: {reason}.", field="api_key_file")
