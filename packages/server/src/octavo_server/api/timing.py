"""How long the parts of a request took, as a field of the answer and as headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_server.metrics import ChoiceProgress


@dataclass(frozen=True)
class Timing:
    """Times of one API request. With several choices, those of the longest.

    Attributes:
        queue: Seconds from its arrival until the engine first ran it.
        prefill: Seconds from then until the first token.
        decode: Seconds from then until the last token.
        num_preemptions: How often choices had to go back in line.
        num_cached_tokens: As in ``usage``.
    """

    queue: float
    prefill: float
    decode: float
    num_preemptions: int
    num_cached_tokens: int

    def field(self) -> dict[str, Any]:
        """Return the ``timing`` of an answer."""
        return {
            "queue_seconds": round(self.queue, 6),
            "prefill_seconds": round(self.prefill, 6),
            "decode_seconds": round(self.decode, 6),
            "preemptions": self.num_preemptions,
            "cached_tokens": self.num_cached_tokens,
        }

    def headers(self) -> dict[str, str]:
        """Return the same as headers; ``Server-Timing`` is the standard one, in milliseconds."""
        parts = {"queue": self.queue, "prefill": self.prefill, "decode": self.decode}
        return {
            "Server-Timing": ", ".join(
                f"{name};dur={1000 * value:.3f}" for name, value in parts.items()
            ),
            "X-Octavo-Preemptions": str(self.num_preemptions),
            "X-Octavo-Cached-Tokens": str(self.num_cached_tokens),
        }


def timing_of(choices: Sequence[ChoiceProgress], choices_per_prompt: int = 1) -> Timing:
    """Sum up what happened to the choices of one request.

    Args:
        choices_per_prompt: Of so many only the first counts its cached tokens: the others
            find its blocks.
    """
    ran = [choice for choice in choices if choice.first_token_time]

    def longest(start: str, end: str) -> float:
        # The machine's clock may have been set back meanwhile.
        return max((getattr(c, end) - getattr(c, start) for c in ran), default=0.0)

    return Timing(
        queue=max(0.0, longest("arrival_time", "scheduled_time")),
        prefill=max(0.0, longest("scheduled_time", "first_token_time")),
        decode=max(0.0, longest("first_token_time", "last_token_time")),
        num_preemptions=sum(choice.num_preemptions for choice in choices),
        num_cached_tokens=sum(choice.num_cached_tokens for choice in choices[::choices_per_prompt]),
    )
