"""Log-probabilities in the shapes of the two APIs."""

from __future__ import annotations

from typing import Any

from octavo_server.request_output import PositionLogprob, PositionLogprobs

# JSON has no minus infinity; OpenAI writes this for a token that can't be.
_LEAST_LOGPROB = -9999.0


def chat_logprobs(positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
    """Return the ``logprobs`` of a chat choice."""
    if positions is None:
        return None
    content = [
        _chat_token(position.chosen) | {"top_logprobs": [_chat_token(top) for top in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: list[PositionLogprobs] | None, text_offset: int
) -> tuple[dict[str, Any] | None, int]:
    """Return the ``logprobs`` of a completion choice, and the offset where the next one starts.

    Args:
        text_offset: Characters of the choice's text before the first position.
    """
    if positions is None:
        return None, text_offset
    offsets = []
    for position in positions:
        offsets.append(text_offset)
        text_offset += len(position.chosen.token)
    logprobs = {
        "tokens": [position.chosen.token for position in positions],
        "token_logprobs": [_finite(position.chosen.logprob) for position in positions],
        "top_logprobs": [_top_by_token(position) for position in positions],
        "text_offset": offsets,
    }
    return logprobs, text_offset


def _top_by_token(position: PositionLogprobs) -> dict[str, float]:
    """Map tokens to values. The chosen token is always there, likely or not."""
    tops: dict[str, float] = {}
    for entry in [*position.top, position.chosen]:
        # Different ids may read alike, for example parts of a character: keep the likeliest.
        tops.setdefault(entry.token, _finite(entry.logprob))
    return tops


def _chat_token(entry: PositionLogprob) -> dict[str, Any]:
    return {
        "token": entry.token,
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.token_bytes),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
