"""Log-probabilities in the shapes of the two APIs."""

from __future__ import annotations

from typing import Any

from octavo_server.detokenizer import TextOffsets
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
    positions: list[PositionLogprobs] | None, offsets: TextOffsets
) -> dict[str, Any] | None:
    """Return the ``logprobs`` of a completion choice.

    Args:
        offsets: Has seen all tokens of the choice before the first position.
    """
    if positions is None:
        return None
    return {
        "tokens": [_spell(position.chosen) for position in positions],
        "token_logprobs": [_finite(position.chosen.logprob) for position in positions],
        "top_logprobs": [_top_by_token(position) for position in positions],
        "text_offset": [offsets.push(position.chosen.token_id) for position in positions],
    }


def _spell(entry: PositionLogprob) -> str:
    r"""Return the token as text, or, for a part of a character, as OpenAI's ``bytes:\xf0\x9f``.

    The shape has no field for the bytes, and U+FFFD would not tell one part from another.
    """
    try:
        return entry.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)


def _top_by_token(position: PositionLogprobs) -> dict[str, float]:
    """Map tokens to values. The chosen token is always there, likely or not."""
    tops: dict[str, float] = {}
    for entry in [*position.top, position.chosen]:
        # Different ids may be spelt alike: keep the likeliest.
        tops.setdefault(_spell(entry), _finite(entry.logprob))
    return tops


def _chat_token(entry: PositionLogprob) -> dict[str, Any]:
    return {
        "token": entry.token,
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.token_bytes),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
