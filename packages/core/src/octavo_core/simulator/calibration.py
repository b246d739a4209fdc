"""From measured steps to a cost model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from octavo_core.errors import ConfigError
from octavo_core.simulator.cost_model import CostModel, StepLoad
from octavo_core.simulator.least_squares import solve_non_negative

# Where the cost of a token may change. Products of matrices go from bound by memory to bound
# by arithmetic somewhere in here, on CPUs near the start and on GPUs near the end; and a step
# of one token has kernels of its own, which make it 30 % shorter than one of two on a CPU.
TOKEN_KNOTS = (0, 1, 2, 8, 32, 128, 512)

MIN_OBSERVATIONS = 12


class Observation(NamedTuple):
    """One measured step: what it computed, and its seconds from schedule to update."""

    load: StepLoad
    seconds: float


def fit_cost_model(
    observations: Sequence[Observation],
    source: str = "",
    token_knots: tuple[int, ...] = TOKEN_KNOTS,
) -> CostModel:
    """Fit a cost model by non-negative least squares of the relative errors.

    Relative, because a decode step of 20 ms counts as much as a prompt of 2 s: most steps
    are short ones. Steps with the same load are taken as one, with their median, so that
    a few that another process delayed do not count.

    Args:
        observations: Steps of several kinds; more kinds than unknowns.
        source: What was measured, for a person.
        token_knots: Knots of the piecewise linear term.

    Raises:
        ConfigError: There are too few kinds of steps.
    """
    by_load: dict[StepLoad, list[float]] = {}
    for load, seconds in observations:
        by_load.setdefault(load, []).append(seconds)
    medians = {load: statistics.median(times) for load, times in by_load.items()}
    if len(medians) < MIN_OBSERVATIONS:
        raise ConfigError(
            f"{len(medians)} kinds of steps were measured; a fit needs at least "
            f"{MIN_OBSERVATIONS}.",
            field="calibrate",
        )
    rows = [
        [value / seconds for value in _features(load, token_knots)]
        for load, seconds in medians.items()
    ]
    solution = solve_non_negative(rows, [1.0] * len(rows))
    step, row, sample, context, pair, *tokens = solution
    model = CostModel(
        step_seconds=step,
        token_knots=token_knots,
        token_seconds=tuple(tokens),
        row_seconds=row,
        sample_seconds=sample,
        context_seconds=context,
        pair_seconds=pair,
        source=source,
    )
    errors = [abs(model.seconds(load) / seconds - 1) for load, seconds in medians.items()]
    return msgspec.structs.replace(model, median_error=statistics.median(errors))


def _features(load: StepLoad, token_knots: tuple[int, ...]) -> list[float]:
    """Return what each unknown is multiplied with: the five plain ones, then one a knot."""
    features: list[float] = [
        1,
        load.num_rows,
        load.num_sampled,
        load.num_context_tokens,
        load.num_attention_pairs,
    ]
    for low, high in zip(token_knots, [*token_knots[1:], float("inf")], strict=True):
        features.append(max(0, min(load.num_tokens, high) - low))
    return features
