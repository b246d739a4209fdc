"""Random arrivals, prefixes, aborts and failures against a fake executor."""

from __future__ import annotations

import os

import pytest

from support.simulation import Simulation, run_seeds

# `nox -s sim` asks for many more.
NUM_SEEDS = int(os.environ.get("OCTAVO_SIMULATION_SEEDS", "400"))
FIRST_SEED = int(os.environ.get("OCTAVO_SIMULATION_FIRST", "0"))
SEEDS_PER_TEST = 20
PIECES = [
    range(first, min(first + SEEDS_PER_TEST, FIRST_SEED + NUM_SEEDS))
    for first in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, SEEDS_PER_TEST)
]


@pytest.mark.parametrize("piece", PIECES, ids=[str(piece[0]) for piece in PIECES])
def test_simulation(piece: range) -> None:
    run_seeds(piece)


def test_simulations_reach_what_they_are_there_to_reach() -> None:
    seen = dict.fromkeys(
        (
            *("preemptions", "hits", "swaps", "error", "length", "stop", "aborted", "queue"),
            *("culprit", "masks", "forced", "preempted under a grammar"),
        ),
        0,
    )
    for seed in range(100):
        simulation = Simulation(seed)
        simulation.run()
        stats = simulation.scheduler.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["hits"] += stats.prefix_cache_hits
        seen["swaps"] += simulation.executor.num_swaps
        seen["masks"] += simulation.executor.num_masks
        seen["forced"] += simulation.executor.num_forced_tokens
        seen["preempted under a grammar"] += simulation.executor.num_resumed_under_a_grammar
        seen["aborted"] += len(simulation.aborted)
        kinds = list(simulation.errors.values())
        seen["queue"] += kinds.count("QueueFullError")
        seen["culprit"] += kinds.count("RequestFailedError")
        for reason in simulation.reasons.values():
            seen[reason] += 1
    assert all(seen.values()), seen
