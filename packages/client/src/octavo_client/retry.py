"""When to try again, and how long to wait before that."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from octavo_client.errors import APIConnectionError, APIError, OctavoClientError

RETRIED_STATUSES = frozenset({429, 503})

# The engine may have ended in the middle of the request, and does not come back by itself.
_ENGINE_DEAD = "engine_dead"


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff that listens to ``Retry-After``.

    A request is repeated only when the server can't have begun to answer it: no
    connection was made, or it refused with 429 or 503. A 503 with the code
    ``engine_dead`` is final: a request that was running gets it as well.

    Attributes:
        max_retries: Most tries after the first one; 0 means one try.
        first_delay: Seconds before the second try, doubled for each further one.
        max_delay: Most seconds of backoff.
        max_retry_after: A server that asks for more seconds than this gets its way
            by the error being raised at once.
    """

    max_retries: int = 2
    first_delay: float = 0.5
    max_delay: float = 8.0
    max_retry_after: float = 60.0

    def delay(self, num_retries: int, error: OctavoClientError) -> float | None:
        """Return seconds to wait before the next try, or None to raise `error`.

        Args:
            num_retries: Tries made so far after the first one.
            error: How the last try ended.
        """
        if num_retries >= self.max_retries:
            return None
        if isinstance(error, APIError):
            if error.status not in RETRIED_STATUSES or error.code == _ENGINE_DEAD:
                return None
            if error.retry_after is not None:
                return error.retry_after if error.retry_after <= self.max_retry_after else None
        elif not isinstance(error, APIConnectionError) or error.connected:
            return None
        backoff = min(self.first_delay * 2.0**num_retries, self.max_delay)
        # Jitter keeps clients that failed together from coming back together.
        return backoff * random.uniform(0.5, 1.0)


def parse_retry_after(value: str | None) -> float | None:
    """Read a ``Retry-After`` header: seconds, or a date. Returns seconds from now, or None."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    if seconds != seconds:
        return None
    return max(seconds, 0.0)
