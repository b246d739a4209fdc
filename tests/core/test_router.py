"""What each router promises, over many requests."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from octavo_core.errors import ConfigError
from octavo_core.router import (
    LeastLoadedRouter,
    PowerOfTwoRouter,
    PrefixAffinityRouter,
    RoundRobinRouter,
    make_router,
)

PROMPT = [1, 2, 3]


def test_round_robin_takes_turns() -> None:
    router = RoundRobinRouter()
    assert [router.route(PROMPT, [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]


def test_least_loaded_takes_the_lowest_and_equal_ones_in_turn() -> None:
    router = LeastLoadedRouter()
    assert router.route(PROMPT, [3, 1, 2]) == 1
    assert [router.route(PROMPT, [0, 0, 0]) for _ in range(4)] == [2, 0, 1, 2]


def test_two_choices_never_take_the_worst_of_many_and_balance_well() -> None:
    router = PowerOfTwoRouter(seed=1)
    loads = [0] * 50
    for _ in range(5000):
        loads[router.route(PROMPT, loads)] += 1
    one_choice = random.Random(1)
    random_loads = Counter(one_choice.randrange(50) for _ in range(5000))
    assert max(loads) - 100 <= 5  # of O(log log n)
    assert max(random_loads.values()) - 100 > 10


def test_affinity_keeps_a_prefix_in_one_place_while_there_is_room() -> None:
    router = PrefixAffinityRouter(8, num_key_tokens=4)
    loads = [4] * 8
    places = {router.route([7, 7, 7, 7, tail], loads) for tail in range(50)}
    assert len(places) == 1
    spread = {router.route([head, 0, 0, 0], loads) for head in range(200)}
    assert spread == set(range(8))


def test_affinity_bounds_the_load_whatever_the_keys() -> None:
    """The bound of the paper: nobody gets more than ceil(c × mean), with one key only too."""
    for num_keys in (1, 3, 1000):
        router = PrefixAffinityRouter(16, num_key_tokens=4, load_factor=1.25)
        draw = random.Random(num_keys)
        loads = [0] * 16
        for total in range(1, 2000):
            index = router.route([draw.randrange(num_keys)] * 4, loads)
            loads[index] += 1
            assert loads[index] <= math.ceil(1.25 * total / 16)


def test_a_replica_more_moves_few_prefixes() -> None:
    keys = [[key, key + 1] for key in range(2000)]
    before, after = PrefixAffinityRouter(10), PrefixAffinityRouter(11)
    moved = [key for key in keys if before.route(key, [0] * 10) != after.route(key, [0] * 11)]
    assert 0.02 < len(moved) / len(keys) < 0.2  # 1/11 of them in the mean
    assert all(after.route(key, [0] * 11) == 10 for key in moved)


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="router is 'best'"):
        make_router("best", 2)
    with pytest.raises(ConfigError, match="router_load_factor is 1"):
        make_router("prefix_affinity", 2, load_factor=1)
    with pytest.raises(ConfigError, match="router_key_tokens is 0"):
        make_router("prefix_affinity", 2, num_key_tokens=0)
