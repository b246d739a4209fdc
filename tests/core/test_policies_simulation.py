"""The simulation, with policies other than first come, first served."""

from __future__ import annotations

import random

import pytest

from octavo_core.policies import FairSharePolicy, PriorityPolicy, SchedulingPolicy
from octavo_core.policies.lazy_heap import LazyHeap
from support.policy_driver import ShortestPromptFirst
from support.simulation import Simulation

NUM_SEEDS = 240
SEEDS_PER_TEST = 20


def choose_policy(rng: random.Random) -> SchedulingPolicy:
    return rng.choice(
        [
            lambda: PriorityPolicy(promote_every=rng.randint(1, 8)),
            lambda: FairSharePolicy(rng.choice([0.5, 1]), rng.choice([1, 2]), rng.randint(0, 3)),
            ShortestPromptFirst,
        ]
    )()


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_simulation(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        simulation = Simulation(seed, choose_policy)
        try:
            simulation.run()
            check_forgotten(simulation.scheduler._policy)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def check_forgotten(policy: SchedulingPolicy) -> None:
    """Nothing is kept of requests that have ended."""
    for name, kept in vars(policy).items():
        if isinstance(kept, dict | set | LazyHeap):
            assert len(kept) == 0 or name in ("_tenants", "_idle"), f"{name} keeps ended requests"
    if isinstance(policy, FairSharePolicy):
        assert len(policy._tenants) == len(policy._idle) <= policy._max_idle_tenants
        for tenant in policy._tenants.values():
            assert len(tenant.line) == len(tenant.running) == tenant.num_counted_tokens == 0
