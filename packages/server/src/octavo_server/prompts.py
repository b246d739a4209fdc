"""Prompts as the methods of `LLM` take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo_core.errors import InvalidRequestError

Prompt = str | list[int]
"""A text, or its token ids."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list.

    Raises:
        InvalidRequestError: One is neither a string nor a list.
    """
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    for item in items:
        if not isinstance(item, str | list | tuple):
            raise InvalidRequestError(
                f"prompts has an item of type {type(item).__name__}; a prompt is a string or a "
                f"list of token ids.",
                field="prompts",
            )
    return items
