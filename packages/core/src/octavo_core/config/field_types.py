"""What the types of settings say beside what they accept: limits, units, secrets."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]

Texts = tuple[Annotated[str, Meta(min_length=1)], ...]

BYTES = {"unit": "bytes"}  # accepts 512MiB, 4GiB, 80GB
TOKENS = {"unit": "tokens"}  # accepts 8k, 1M
SECRET = {"secret": True}  # never shown, and not told to the engine

VISIBLE_ASCII = "^[!-~]+$"
"""A pattern of what a header can carry without quoting."""
