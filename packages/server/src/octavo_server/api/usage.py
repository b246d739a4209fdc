"""Counts the tokens of one API request."""

from __future__ import annotations

from typing import Any

from octavo_server.request_output import OutputDelta


class UsageCounter:
    """Adds up what the choices of one request used.

    Args:
        num_prompt_tokens: Length of each prompt. It counts once, however many choices it has.
        choices_per_prompt: The request's ``n``.
    """

    def __init__(self, num_prompt_tokens: list[int], choices_per_prompt: int) -> None:
        self._prompt_tokens = sum(num_prompt_tokens)
        self._cached_tokens = [0] * len(num_prompt_tokens)
        self._choices_per_prompt = choices_per_prompt
        self._completion_tokens = 0

    def add(self, delta: OutputDelta) -> None:
        """Count one delta."""
        self._completion_tokens += len(delta.token_ids)
        prompt, choice = divmod(delta.index, self._choices_per_prompt)
        # Later choices find the first one's blocks; that is no earlier work saved.
        if choice == 0 and delta.num_cached_tokens > self._cached_tokens[prompt]:
            self._cached_tokens[prompt] = delta.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        """Return the counts in OpenAI's shape."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }
