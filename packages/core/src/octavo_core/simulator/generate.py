"""Traces drawn from a few numbers, for a load that nobody has recorded."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator
from itertools import accumulate

import msgspec

from octavo_core.errors import ConfigError
from octavo_core.simulator.trace import MAX_TIME, MAX_TOKENS, TraceEntry


class TraceShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a generated trace looks like.

    Attributes:
        num_requests: Lines of the trace.
        rate: Mean arrivals per second, as a Poisson process; infinity means all at once.
        prompt_tokens: Mean length of the part of a prompt that nobody shares.
        output_tokens: Mean length of an answer.
        length_spread: Standard deviation of both lengths as a share of the mean; lengths
            are log-normal, and 0 makes them all equal.
        shared_prefix: Tokens in front of each prompt that its group shares.
        num_prefix_groups: How many such groups there are.
        prefix_skew: Exponent of Zipf's law for the groups' popularity; 0 makes them equal.
        max_tokens: No prompt or answer is longer than this.
        seed: Equal seeds make equal traces.
    """

    num_requests: int
    rate: float
    prompt_tokens: int = 512
    output_tokens: int = 128
    length_spread: float = 0.5
    shared_prefix: int = 0
    num_prefix_groups: int = 100
    prefix_skew: float = 1.0
    max_tokens: int = 1 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_tokens", "output_tokens", "num_prefix_groups"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _check("rate", self.rate, self.rate > 0, "above 0")
        for name in ("length_spread", "shared_prefix", "prefix_skew"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        limit = self.max_tokens
        _check("max_tokens", limit, 1 <= limit <= MAX_TOKENS, f"from 1 to {MAX_TOKENS}")
        room = MAX_TOKENS - limit
        _check("shared_prefix", self.shared_prefix, self.shared_prefix <= room, f"at most {room}")


def generate_trace(shape: TraceShape) -> Iterator[TraceEntry]:
    """Yield the arrivals of a shape, one at a time."""
    draw = random.Random(shape.seed)
    popularity = list(
        accumulate((rank + 1) ** -shape.prefix_skew for rank in range(shape.num_prefix_groups))
    )
    now = 0.0
    for index in range(shape.num_requests):
        if index and math.isfinite(shape.rate):
            now += draw.expovariate(shape.rate)
            _check(
                "rate", shape.rate, now <= MAX_TIME, f"so high that all arrive in {MAX_TIME:g} s"
            )
        prompt_tokens = _draw_length(draw, shape.prompt_tokens, shape)
        output_tokens = _draw_length(draw, shape.output_tokens, shape)
        group = None
        if shape.shared_prefix:
            rank = bisect.bisect_left(popularity, draw.random() * popularity[-1])
            group = f"group-{rank}"
        yield TraceEntry(
            time=round(now, 6),
            prompt_tokens=prompt_tokens + shape.shared_prefix,
            output_tokens=output_tokens,
            prefix_group=group,
            prefix_tokens=shape.shared_prefix,
        )


def _draw_length(draw: random.Random, mean: int, shape: TraceShape) -> int:
    if shape.length_spread == 0:
        return min(mean, shape.max_tokens)
    variance = math.log1p(shape.length_spread**2)
    length = draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return max(1, min(round(length), shape.max_tokens))


def _check(name: str, value: float, is_right: bool, limit: str) -> None:
    if not is_right:
        raise ConfigError(f"{name} is {value}; it must be {limit}.", field=name)
