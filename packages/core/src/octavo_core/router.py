"""Which replica a request goes to.

A router knows what a front really knows: the prompt, and how many requests each replica
has that are not finished.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from typing import Protocol

from octavo_core.block_hash import ROOT_HASH, hash_block
from octavo_core.errors import ConfigError


class Router(Protocol):
    """Chooses a replica for each request."""

    def route(self, prompt_token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """Return the index of a replica.

        Args:
            prompt_token_ids: The request's prompt.
            loads: For each replica, its requests that are not finished.
        """
        ...


class RoundRobinRouter:
    """One after the other, whatever they have to do."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, prompt_token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """Return the next replica."""
        index = self._next % len(loads)
        self._next = index + 1
        return index


class LeastLoadedRouter:
    """The replica with the fewest unfinished requests; equal ones take turns."""

    def __init__(self) -> None:
        self._start = 0

    def route(self, prompt_token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """Return the least loaded replica."""
        lowest = min(loads)
        start = self._start % len(loads)
        try:
            index = loads.index(lowest, start)
        except ValueError:
            index = loads.index(lowest)
        self._start = index + 1
        return index


class PowerOfTwoRouter:
    """The less loaded of two replicas drawn at random (Mitzenmacher, 2001)."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def route(self, prompt_token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """Return the better of two."""
        first = int(self._random.random() * len(loads))
        second = int(self._random.random() * len(loads))
        return second if loads[second] < loads[first] else first


class PrefixAffinityRouter:
    """Prompts that start alike go to the replica that has their blocks, unless it is overloaded.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
    arXiv 1608.01350): a key's replica is the first one after it on a ring whose load is
    under `load_factor` times the mean. So a popular prefix spills over to the same few
    neighbours, and no replica has more than ``ceil(load_factor × mean)`` requests.

    Args:
        num_replicas: Replicas on the ring.
        num_key_tokens: The key is a hash of the prompt's first so many tokens.
        load_factor: Above 1. Near 1 balances better, more keeps prefixes together.
    """

    # Points of each replica on the ring: its share of the keys is within about
    # 1/sqrt(128) = 9 % of an equal one.
    POINTS = 128

    def __init__(
        self, num_replicas: int, num_key_tokens: int = 128, load_factor: float = 1.25
    ) -> None:
        if load_factor <= 1:
            raise ConfigError(
                f"router_load_factor is {load_factor}; it must be above 1.",
                field="router_load_factor",
            )
        if num_key_tokens < 1:
            raise ConfigError(
                f"router_key_tokens is {num_key_tokens}; it must be at least 1.",
                field="router_key_tokens",
            )
        self._num_key_tokens = num_key_tokens
        self._load_factor = load_factor
        self._ring = sorted(
            (hash_block(ROOT_HASH, (replica, point)), replica)
            for replica in range(num_replicas)
            for point in range(self.POINTS)
        )

    def route(self, prompt_token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """Return the first replica on the ring that has room."""
        # With this request counted, or nobody would have room for the first.
        limit = math.ceil(self._load_factor * (sum(loads) + 1) / len(loads))
        key = hash_block(ROOT_HASH, prompt_token_ids[: self._num_key_tokens])
        ring = self._ring
        index = bisect.bisect_left(ring, (key, 0))
        for step in range(len(ring)):
            replica = ring[(index + step) % len(ring)][1]
            if loads[replica] < limit:
                return replica
        raise AssertionError("some replica is not above the mean")


ROUTERS = ("round_robin", "least_loaded", "power_of_two", "prefix_affinity")


def make_router(
    name: str,
    num_replicas: int,
    *,
    seed: int = 0,
    num_key_tokens: int = 128,
    load_factor: float = 1.25,
) -> Router:
    """Make a router by name.

    Raises:
        ConfigError: There is no such router.
    """
    if name == "round_robin":
        return RoundRobinRouter()
    if name == "least_loaded":
        return LeastLoadedRouter()
    if name == "power_of_two":
        return PowerOfTwoRouter(seed)
    if name == "prefix_affinity":
        return PrefixAffinityRouter(num_replicas, num_key_tokens, load_factor)
    raise ConfigError(f"router is {name!r}; there are {', '.join(ROUTERS)}.", field="router")
